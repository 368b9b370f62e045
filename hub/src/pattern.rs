// SPDX-License-Identifier: Apache-2.0
//! The Hub's file patterns: shell wildcards over the whole path, where `*` crosses `/` (as Python's `fnmatch`), and a
//! pattern that ends in `/` means everything below.

/// True if `path` matches one of `allow` (or there is none) and none of `ignore`.
pub fn selected(path: &str, allow: &[String], ignore: &[String]) -> bool {
    let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, path));
    (allow.is_empty() || any(allow)) && !any(ignore)
}

fn matches(pattern: &str, path: &str) -> bool {
    let mut pattern: Vec<char> = pattern.chars().collect();
    if pattern.last() == Some(&'/') {
        pattern.push('*');
    }
    let path: Vec<char> = path.chars().collect();
    let (mut p, mut t) = (0, 0);
    // Where the last star stood and how far it has eaten: no recursion, so no pattern takes exponential time.
    let mut star: Option<(usize, usize)> = None;
    while t < path.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p + 1, t));
            p += 1;
        } else if let Some(next) = one(&pattern, p, path[t]) {
            (p, t) = (next, t + 1);
        } else if let Some((after, eaten)) = star {
            star = Some((after, eaten + 1));
            (p, t) = (after, eaten + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// The position after the element at `p`, if that element matches `c`.
fn one(pattern: &[char], p: usize, c: char) -> Option<usize> {
    match *pattern.get(p)? {
        '?' => Some(p + 1),
        '[' => {
            let negated = pattern.get(p + 1) == Some(&'!');
            let start = p + 1 + usize::from(negated);
            // A `]` that comes first is a member, and a `[` that is never closed is itself.
            let Some(end) = (start + 1..pattern.len()).find(|at| pattern[*at] == ']') else {
                return (c == '[').then_some(p + 1);
            };
            let set = &pattern[start..end];
            let (mut i, mut found) = (0, false);
            while i < set.len() {
                if i + 2 < set.len() && set[i + 1] == '-' {
                    found |= (set[i]..=set[i + 2]).contains(&c);
                    i += 3;
                } else {
                    found |= set[i] == c;
                    i += 1;
                }
            }
            (found != negated).then_some(end + 1)
        }
        plain => (plain == c).then_some(p + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_pythons_fnmatch_does() {
        for (pattern, path, wanted) in [
            ("*.json", "vae/config.json", true),
            ("*.json", "config.jsonl", false),
            ("vae/", "vae/a/b.bin", true),
            ("vae", "vae/a", false),
            ("model-0000[1-3].*", "model-00002.safetensors", true),
            ("model-0000[!1-3].*", "model-00002.safetensors", false),
            ("[]]x", "]x", true),
            ("[x", "[x", true),
            ("?.txt", "a.txt", true),
            ("?.txt", ".txt", false),
            ("**/*", "a/b", true),
            ("", "", true),
            ("a*a*a*a*a*b", &"a".repeat(2000), false),
        ] {
            assert_eq!(matches(pattern, path), wanted, "{pattern} on {path}");
        }
        let list = |text: &str| vec![text.to_owned()];
        assert!(selected("a.bin", &[], &[]) && selected("a.bin", &list("*.bin"), &list("b*")));
        assert!(!selected("a.bin", &list("*.json"), &[]) && !selected("b.bin", &list("*.bin"), &list("b*")));
    }
}
