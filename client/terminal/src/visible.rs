//! Text from other sources for a terminal: names of processes and hosts, and messages of peers, may hold
//! control characters.

use std::borrow::Cow;

/// Replaces characters that steer a terminal or reorder its line, all but newlines, by their escapes (`\u{1b}`).
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, |letter| letter != '\n' && steers(letter))
}

/// Replaces the characters that [`visible`] replaces, and newlines, so that the text stays on one line.
pub fn visible_line(text: &str) -> Cow<'_, str> {
    escaped(text, steers)
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if is_escaped(letter) {
            safe.extend(letter.escape_default());
        } else {
            safe.push(letter);
        }
    }
    Cow::Owned(safe)
}

/// Returns true for control characters (C0, DEL, C1), and those that change the direction of text (UAX #9).
fn steers(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_escaped_and_letters_stay() {
        for (text, shown) in [
            ("job ünï ✓ µs…", "job ünï ✓ µs…"),
            ("a\u{1b}[2Jb", "a\\u{1b}[2Jb"),
            ("a\rb\tc\u{7f}", "a\\rb\\tc\\u{7f}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("abc\u{202e}gpj", "abc\\u{202e}gpj"),
        ] {
            assert_eq!(visible(text), shown);
            assert_eq!(visible_line(text), shown);
        }
        assert_eq!(visible("one\ntwo"), "one\ntwo");
        assert_eq!(visible_line("one\ntwo"), "one\\ntwo");
    }
}
