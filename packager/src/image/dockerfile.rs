// SPDX-License-Identifier: Apache-2.0
//! What a Dockerfile needs of the engine, read before anything is sent to it.

/// Instructions that only BuildKit understands, with the line of each.
pub fn buildkit_features(text: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let mut continued = false;
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        if index < 10 && trimmed.to_lowercase().replace(' ', "").starts_with("#syntax=") {
            found.push((index + 1, "# syntax= (the engine pulls a frontend image)"));
        }
        if trimmed.starts_with('#') {
            continue;
        }
        let word = trimmed.split_whitespace().next().unwrap_or_default().to_uppercase();
        let starts = |name: &str| word == name && !continued;
        let flag = |name: &str| {
            trimmed
                .split_whitespace()
                .skip(1)
                .take_while(|word| word.starts_with("--"))
                .any(|word| word.starts_with(name))
        };
        if starts("RUN") && flag("--mount") {
            found.push((index + 1, "RUN --mount"));
        }
        if starts("RUN") && (flag("--network") || flag("--security")) {
            found.push((index + 1, "RUN --network or --security"));
        }
        if (starts("COPY") || starts("ADD"))
            && (flag("--link") || flag("--chmod") || flag("--parents") || flag("--exclude"))
        {
            found.push((index + 1, "COPY or ADD with --link, --chmod, --parents or --exclude"));
        }
        if (starts("RUN") || starts("COPY"))
            && trimmed
                .split_whitespace()
                .any(|word| word.len() > 2 && word.starts_with("<<") && !word.starts_with("<<<"))
        {
            found.push((index + 1, "a here-document"));
        }
        continued = trimmed.trim_end().ends_with('\\');
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_found_where_they_are_instructions() {
        let text = "# syntax=docker/dockerfile:1\nFROM a\nRUN --mount=type=cache,target=/c x\nRUN echo \\\n RUN --mount=no\nCOPY --link a b\nRUN <<EOF\nEOF\nCOPY --from=x a b\n# RUN --mount\nRUN cat <<< word\n";
        let lines: Vec<usize> = buildkit_features(text).into_iter().map(|(line, _)| line).collect();
        assert_eq!(lines, [1, 3, 6, 7]);
        assert!(buildkit_features("FROM a\nRUN x --mount=1\n").is_empty());
    }
}
