//! Texts that end the text: never given out, not even in part.

use candle_quant::{Error, Result};

/// Holds back what may be the beginning of a stop string.
pub(super) struct StopStrings<'p> {
    stops: &'p [String],
    held: String,
}

impl<'p> StopStrings<'p> {
    /// # Errors
    /// If one is empty.
    pub fn new(stops: &'p [String]) -> Result<Self> {
        match stops.iter().any(String::is_empty) {
            true => Err(Error::mismatch("stop string", "at least one character", "none")),
            false => Ok(Self { stops, held: String::new() }),
        }
    }

    /// Takes a piece of text; returns what is certain by now, and whether a stop string follows it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        if let Some(start) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(start);
            return (std::mem::take(&mut self.held), true);
        }
        let begins_stop = |start: &usize| {
            let rest = self.held.get(*start..);
            rest.is_some_and(|rest| self.stops.iter().any(|stop| stop.starts_with(rest)))
        };
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest);
        let end = self.held.len();
        let begin = (first..end).find(begins_stop).unwrap_or(end);
        let rest = self.held.split_off(begin);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What is held back when the text ends.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let (mut stop_strings, mut given) = (StopStrings::new(&stops).unwrap(), Vec::new());
        for piece in pieces {
            let (text, stopped) = stop_strings.push(piece);
            given.push(text);
            if stopped {
                return (given, true);
            }
        }
        given.push(stop_strings.finish());
        (given, false)
    }

    #[test]
    fn what_may_begin_a_stop_string_is_held_back() {
        let given = |stops: &[&str], pieces: &[&str]| run(stops, pieces).0;
        assert_eq!(given(&[], &["a", "b"]), ["a", "b", ""]);
        assert_eq!(given(&["END"], &["a E", "N", "x", "E"]), ["a ", "", "ENx", "", "E"]);
        assert_eq!(run(&["END"], &["a E", "N", "D rest"]), (vec!["a ".into(), "".into(), "".into()], true));
        assert_eq!(run(&["b", "abc"], &["xa", "b"]), (vec!["x".into(), "a".into()], true));
        assert_eq!(given(&["aab"], &["aaa", "a"]), ["a", "a", "aa"]);
        assert_eq!(given(&["🦀🦀"], &["🦀", "ä"]), ["", "🦀ä", ""]);
        assert!(StopStrings::new(&[String::new()]).is_err());
    }

    proptest! {
        #[test]
        fn the_text_ends_before_the_first_stop_string(
            pieces in prop::collection::vec("[abä]{0,3}", 0..12),
            stops in prop::collection::vec("[abä]{1,4}", 1..4),
        ) {
            let whole = pieces.concat();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (given, stopped) = run(&stops, &pieces);
            let text = given.concat();
            prop_assert!(whole.starts_with(&text));
            prop_assert!(stops.iter().all(|stop| !text.contains(stop)));
            let found = stops.iter().any(|stop| whole.contains(stop));
            prop_assert_eq!(stopped, found);
            prop_assert!(stopped || text == whole);
            let follows = |stop: &&str| whole[text.len()..].starts_with(*stop);
            prop_assert!(!stopped || stops.iter().any(follows));
        }
    }
}
