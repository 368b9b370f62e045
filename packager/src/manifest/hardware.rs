// SPDX-License-Identifier: Apache-2.0
//! Board labels and mesh names: how many chips they stand for.

/// Chips per board of each known board.
const BOARDS: [(&str, u32); 6] =
    [("p100", 1), ("p150", 1), ("n150", 1), ("e150", 1), ("p300", 2), ("n300", 2)];

/// Mesh names and their rows and columns. Case matters.
const MESHES: [(&str, (u32, u32)); 14] = [
    ("N150", (1, 1)),
    ("P100", (1, 1)),
    ("P150", (1, 1)),
    ("P150x2", (1, 2)),
    ("N300", (1, 2)),
    ("P300", (1, 2)),
    ("N150x4", (1, 4)),
    ("P150x4", (1, 4)),
    ("P300x2", (1, 4)),
    ("T3K", (1, 8)),
    ("P150x8", (1, 8)),
    ("QB2", (2, 2)),
    ("TG", (4, 8)),
    ("BH-Galaxy", (4, 8)),
];

/// Chips of a board label: a known board, perhaps one revision letter, perhaps a count. `p100a` is 1,
/// `p300x2` is 4; none for anything else, among it machine names (`QB2`) and counts of zero.
pub fn chips(label: &str) -> Option<u32> {
    let label = label.trim().to_lowercase();
    let (board, count) = match label.split_once('x') {
        Some((board, count)) if !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit()) => {
            (board, count.parse().ok()?)
        }
        Some(_) => return None,
        None => (label.as_str(), 1_u32),
    };
    let known = |name: &str| BOARDS.iter().find(|(board, _)| *board == name).map(|(_, chips)| *chips);
    let per_board = known(board).or_else(|| known(board.strip_suffix(|c: char| c.is_ascii_lowercase())?))?;
    per_board.checked_mul(count).filter(|chips| *chips > 0)
}

/// Rows and columns of a mesh: a name of the table or a literal "(rows, columns)" or "[rows, columns]".
pub fn mesh(name: &str) -> Option<(u32, u32)> {
    if let Some((_, shape)) = MESHES.iter().find(|(known, _)| *known == name) {
        return Some(*shape);
    }
    let name = name.trim();
    let inner = name
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'))
        .or_else(|| name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')))?;
    let (rows, columns) = inner.split_once(',')?;
    let (rows, columns) = (rows.trim().parse().ok()?, columns.trim().parse().ok()?);
    (rows > 0 && columns > 0).then_some((rows, columns))
}

/// Names of all boards, for messages.
pub fn boards() -> impl Iterator<Item = &'static str> {
    BOARDS.iter().map(|(name, _)| *name)
}

/// Names of all meshes, for messages.
pub fn meshes() -> impl Iterator<Item = &'static str> {
    MESHES.iter().map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_with_revision_letter_and_count_are_understood() {
        for (label, expected) in [
            ("p100a", 1),
            ("p300c", 2),
            ("P150X4", 4),
            ("p300x2", 4),
            ("n300", 2),
            (" e150 ", 1),
            ("p150ax4", 4),
        ] {
            assert_eq!(chips(label), Some(expected), "{label}");
        }
        for label in ["t3k", "QB2", "p150b7", "p150x0", "", "x4", "p150x", "p150x99999999999", "p100aa"] {
            assert_eq!(chips(label), None, "{label}");
        }
    }

    #[test]
    fn meshes_are_names_or_literals() {
        assert_eq!(mesh("QB2"), Some((2, 2)));
        assert_eq!(mesh("(2, 4)"), Some((2, 4)));
        assert_eq!(mesh("[1,1]"), Some((1, 1)));
        for name in ["qb2", "P150X4", "(2)", "(0, 4)", "2x2", "(1, 2]", "(1, 2, 3)"] {
            assert_eq!(mesh(name), None, "{name}");
        }
    }
}
