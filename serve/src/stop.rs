//! Stop strings, found in text that comes piece by piece.

/// Looks for stop strings. What may be the beginning of one is held back until it is known.
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Looks for `strings`, none of which is empty.
    pub fn new(strings: Vec<String>) -> Self {
        Self {
            strings,
            held: String::new(),
        }
    }

    /// Takes the next piece. Gives what can be shown, and whether a stop string came behind that; the one that begins
    /// first counts, and the text goes no further then.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.strings.is_empty() {
            return (piece.to_owned(), false);
        }
        self.held.push_str(piece);
        let from = self.held.len() - self.open();
        // Behind `from`, one that begins earlier may still come.
        if let Some(at) = self.found().filter(|at| *at <= from) {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let rest = self.held.split_off(from);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Where the first of those begins that are there as a whole.
    fn found(&self) -> Option<usize> {
        self.strings.iter().filter_map(|s| self.held.find(s)).min()
    }

    /// The bytes at the end that may be the beginning of a stop string.
    fn open(&self) -> usize {
        let longest = |stop: &String| {
            let ends = stop.char_indices().skip(1).map(|(at, _)| at);
            ends.filter(|at| self.held.ends_with(&stop[..*at])).max()
        };
        self.strings.iter().filter_map(longest).max().unwrap_or(0)
    }

    /// What of the text that was held back can be shown where the text ends, and whether a stop string came behind
    /// that.
    pub fn finish(&mut self) -> (String, bool) {
        let found = self.found();
        self.held.truncate(found.unwrap_or(usize::MAX));
        (std::mem::take(&mut self.held), found.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::StopStrings;

    /// What is shown of pieces, and whether the text was stopped.
    fn shown(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut stops = StopStrings::new(stops.iter().map(ToString::to_string).collect());
        let mut all = Vec::new();
        for piece in pieces {
            let (text, stopped) = stops.push(piece);
            all.push(text);
            if stopped {
                return (all, true);
            }
        }
        let (text, stopped) = stops.finish();
        all.push(text);
        (all, stopped)
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_found() {
        assert_eq!(
            shown(&["END"], &["a E", "N", "D b"]),
            (vec!["a ".into(), "".into(), "".into()], true)
        );
    }

    #[test]
    fn what_only_begins_like_one_is_shown_once_that_is_known() {
        let (pieces, stopped) = shown(&["END", "\n\n"], &["a EN", "T\n", "b E"]);
        assert_eq!(pieces, ["a ", "ENT", "\nb ", "E"]);
        assert!(!stopped);
        // The beginning of one within the beginning of one.
        assert_eq!(
            shown(&["aab"], &["aa", "ab c"]),
            (vec!["".into(), "a".into()], true)
        );
    }

    #[test]
    fn the_one_that_begins_first_counts() {
        assert_eq!(shown(&["c", "bcd"], &["abcd"]), (vec!["a".into()], true));
        assert_eq!(shown(&["é"], &["caf", "é!"]).0, ["caf", ""]);
        // Also if one within it comes as a whole before.
        let stops = ["abcX", "bc"];
        for pieces in [&["_abcX"] as &[_], &["_abc", "X"], &["_a", "bc", "X"]] {
            let (text, stopped) = shown(&stops, pieces);
            assert_eq!((text.concat(), stopped), ("_".into(), true), "{pieces:?}");
        }
        for pieces in [&["_abcY"] as &[_], &["_abc", "Y"], &["_abc"]] {
            let (text, stopped) = shown(&stops, pieces);
            assert_eq!((text.concat(), stopped), ("_a".into(), true), "{pieces:?}");
        }
    }

    /// However the text is cut, the same is shown.
    #[test]
    fn cuts_do_not_matter() {
        let (text, stops) = ("xabababc ünd abcab", ["ababc", "nd ab"]);
        let whole: String = shown(&stops, &[text]).0.concat();
        assert_eq!(whole, "xab");
        let ends: Vec<_> = (0..text.len())
            .filter(|i| text.is_char_boundary(*i))
            .collect();
        for (i, first) in ends.iter().enumerate() {
            for second in &ends[i..] {
                let pieces = [&text[..*first], &text[*first..*second], &text[*second..]];
                assert_eq!(shown(&stops, &pieces).0.concat(), whole, "{pieces:?}");
            }
        }
        let every: Vec<_> = text
            .char_indices()
            .map(|(i, c)| &text[i..i + c.len_utf8()])
            .collect();
        assert_eq!(shown(&stops, &every).0.concat(), whole);
    }
}
