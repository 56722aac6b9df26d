//! Stop strings, found in text that comes piece by piece.

use std::sync::Arc;

/// The bytes that each token stands for.
pub(super) type Vocabulary = Arc<[Box<[u8]>]>;

/// Looks for stop strings in text. What may be the beginning of one is held back until it is known.
///
/// Strings and text are bytes, since a token may end within a character. Of text that is pushed in whole characters and
/// strings of whole characters, whole characters are shown.
///
/// ```
/// use candle_fused::serving::StopStrings;
/// let mut stops = StopStrings::new(vec![b"END".to_vec()]);
/// assert_eq!(stops.push(b"a E"), (b"a ".to_vec(), false));
/// assert_eq!(stops.push(b"ND b"), (b"".to_vec(), true));
/// // It was the beginning of none.
/// let mut stops = StopStrings::new(vec![b"END".to_vec()]);
/// assert_eq!(stops.push(b"a E"), (b"a ".to_vec(), false));
/// assert_eq!(stops.finish(), (b"E".to_vec(), false));
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    strings: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl StopStrings {
    /// Looks for `strings`; an empty one is ignored.
    pub fn new(mut strings: Vec<Vec<u8>>) -> Self {
        strings.retain(|stop| !stop.is_empty());
        Self {
            strings,
            held: Vec::new(),
        }
    }

    /// Takes the next piece. Gives what can be shown, and whether a stop string came behind that; the one that begins
    /// first counts, and the text goes no further then.
    pub fn push(&mut self, piece: &[u8]) -> (Vec<u8>, bool) {
        if self.strings.is_empty() {
            return (piece.to_vec(), false);
        }
        self.held.extend_from_slice(piece);
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
        let at = |stop: &Vec<u8>| self.held.windows(stop.len()).position(|part| part == stop);
        self.strings.iter().filter_map(at).min()
    }

    /// The bytes at the end that may be the beginning of a stop string.
    fn open(&self) -> usize {
        let longest = |stop: &Vec<u8>| {
            (1..stop.len())
                .rev()
                .find(|len| self.held.ends_with(&stop[..*len]))
        };
        self.strings.iter().filter_map(longest).max().unwrap_or(0)
    }

    /// What of the text that was held back can be shown where the text ends, and whether a stop string came behind
    /// that.
    pub fn finish(&mut self) -> (Vec<u8>, bool) {
        let found = self.found();
        self.held.truncate(found.unwrap_or(usize::MAX));
        (std::mem::take(&mut self.held), found.is_some())
    }
}

/// The stop strings of a request, in the bytes of its tokens.
#[derive(Debug)]
pub(super) struct Stopping {
    strings: StopStrings,
    vocabulary: Vocabulary,
}

impl Stopping {
    pub fn new(strings: &[Vec<u8>], vocabulary: &Vocabulary) -> Self {
        Self {
            strings: StopStrings::new(strings.to_vec()),
            vocabulary: Arc::clone(vocabulary),
        }
    }

    /// Takes in a token that was drawn; whether a stop string is there with it, and none that began earlier may still
    /// come.
    pub fn accept(&mut self, token: u32) -> bool {
        let bytes = self.vocabulary.get(token as usize);
        self.strings.push(bytes.map_or(&[], |bytes| bytes)).1
    }

    /// Whether a stop string is there where the text ends.
    pub fn finish(&mut self) -> bool {
        self.strings.finish().1
    }
}

#[cfg(test)]
mod tests {
    use super::{StopStrings, Stopping};

    /// "abcX" may still come behind "abc", so "bc" counts only where the text ends.
    #[test]
    fn a_string_within_one_that_may_come_counts_where_the_text_ends() {
        let strings = [b"abcX".to_vec(), b"bc".to_vec()];
        let pieces = ["a", "b", "c", "d"].map(|piece| piece.as_bytes().into());
        let mut stopping = Stopping::new(&strings, &pieces.into());
        assert_eq!([0, 1, 2].map(|token| stopping.accept(token)), [false; 3]);
        assert!(stopping.finish());
        let mut stopping = Stopping::new(&strings, &stopping.vocabulary);
        assert_eq!(
            [0, 1, 2, 3].map(|token| stopping.accept(token)),
            [false, false, false, true]
        );
        let mut stopping = Stopping::new(&strings, &stopping.vocabulary);
        assert_eq!([0, 1].map(|token| stopping.accept(token)), [false; 2]);
        assert!(!stopping.finish());
    }

    /// What is shown of pieces, and whether the text was stopped.
    fn shown(stops: &[&str], pieces: &[impl AsRef<[u8]>]) -> (Vec<String>, bool) {
        let strings = stops.iter().map(|stop| stop.as_bytes().to_vec());
        let mut stops = StopStrings::new(strings.collect());
        let mut all = Vec::new();
        let mut show = |text| all.push(String::from_utf8(text).expect("whole characters"));
        for piece in pieces {
            let (text, stopped) = stops.push(piece.as_ref());
            show(text);
            if stopped {
                return (all, true);
            }
        }
        let (text, stopped) = stops.finish();
        show(text);
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

    #[test]
    fn without_strings_all_is_shown() {
        for stops in [&[] as &[_], &[""]] {
            assert_eq!(shown(stops, &["a", "b"]).0, ["a", "b", ""]);
        }
    }

    /// However the text is cut, also within a character, the same is shown.
    #[test]
    fn cuts_do_not_matter() {
        let (text, stops) = ("xabababc ünd abcab".as_bytes(), ["ababc", "nd ab"]);
        let whole: String = shown(&stops, &[text]).0.concat();
        assert_eq!(whole, "xab");
        for i in 0..text.len() {
            for j in i..text.len() {
                let pieces = [&text[..i], &text[i..j], &text[j..]];
                assert_eq!(shown(&stops, &pieces).0.concat(), whole, "{pieces:?}");
            }
        }
        let every: Vec<_> = text.chunks(1).collect();
        assert_eq!(shown(&stops, &every).0.concat(), whole);
        // Two characters that begin with the same byte.
        let strings = StopStrings::new(vec!["é!".into()]);
        for cut in 0..6 {
            let (text, mut stops) = ("aèé!b".as_bytes(), strings.clone());
            let (before, stopped) = stops.push(&text[..cut]);
            assert!(!stopped);
            let (behind, stopped) = stops.push(&text[cut..]);
            assert_eq!([before, behind].concat(), "aè".as_bytes());
            assert!(stopped);
        }
    }
}
