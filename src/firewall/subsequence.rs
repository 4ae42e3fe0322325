//! The longest common subsequence of two lists: the rules that remain where they are, or that two families have in
//! common.

/// Returns the longest common subsequence of lists of `a` and `b` elements, as pairs of indexes. If more than
/// `max_compared` pairs would have to be compared, returns only the common beginning and end.
pub(super) fn common_subsequence(
    a: usize,
    b: usize,
    max_compared: usize,
    same: impl Fn(usize, usize) -> bool,
) -> Vec<(usize, usize)> {
    let shorter = a.min(b);
    let head = (0..shorter).take_while(|i| same(*i, *i)).count();
    let tail = (1..=shorter - head).take_while(|i| same(a - i, b - i)).count();
    let (rows, columns) = (a - head - tail, b - head - tail);
    let mut pairs: Vec<(usize, usize)> = (0..head).map(|i| (i, i)).collect();
    if (1..=max_compared).contains(&rows.saturating_mul(columns)) {
        let middle = by_lengths(rows, columns, |row, column| same(head + row, head + column));
        pairs.extend(middle.into_iter().map(|(row, column)| (head + row, head + column)));
    }
    pairs.extend((1..=tail).rev().map(|i| (a - i, b - i)));
    pairs
}

/// Returns the longest common subsequence by the lengths of those of all remainders.
fn by_lengths(rows: usize, columns: usize, same: impl Fn(usize, usize) -> bool) -> Vec<(usize, usize)> {
    let at = |row: usize, column: usize| row * (columns + 1) + column;
    let mut lengths = vec![0_u32; at(rows, columns) + 1];
    for row in (0..rows).rev() {
        for column in (0..columns).rev() {
            lengths[at(row, column)] = if same(row, column) {
                lengths[at(row + 1, column + 1)] + 1
            } else {
                lengths[at(row + 1, column)].max(lengths[at(row, column + 1)])
            };
        }
    }
    let mut pairs = Vec::new();
    let (mut row, mut column) = (0, 0);
    while row < rows && column < columns {
        if same(row, column) {
            pairs.push((row, column));
            (row, column) = (row + 1, column + 1);
        } else if lengths[at(row + 1, column)] >= lengths[at(row, column + 1)] {
            row += 1;
        } else {
            column += 1;
        }
    }
    pairs
}
