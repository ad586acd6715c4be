//! From the entries of a descriptor to the rule that they meet.
//!
//! Rules are a tree: each entry of a descriptor leads one level down, and there is no way back. On each level an
//! entry goes to the child with its key and its value, else to the first child in the order of the file whose
//! wildcard its value fits, else to the child with its key alone. A rule counts only if the last entry leads
//! to it. Keys and values are compared as such, never joined.
//!
//! A step costs one look for the key, one for the value, and with wildcards one for each length that the text
//! before their first `*` has; so a descriptor is matched as fast among ten thousand rules as among ten, as long
//! as their wildcards do not begin alike.

use std::collections::{BTreeMap, HashMap, HashSet};

/// A node of the tree: what the entries so far lead to.
#[derive(Clone, Debug)]
pub struct Node<R> {
    /// What holds for a descriptor that ends here.
    pub rule: Option<R>,
    keys: HashMap<Box<str>, Values<R>>,
}

/// The children of one key.
#[derive(Clone, Debug)]
struct Values<R> {
    exact: HashMap<Box<str>, Node<R>>,
    wild: Vec<(Pattern, Node<R>)>,
    /// Those of `wild` as they were written, so that ten thousand of them are told apart as fast as ten.
    written: HashSet<Box<str>>,
    /// By the text before the first `*`: its length, then the text, and the places in `wild`.
    prefixes: BTreeMap<usize, HashMap<Box<str>, Vec<usize>>>,
    any: Option<Box<Node<R>>>,
}

/// What an entry was found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By<'t> {
    /// Its key and its value.
    Value,
    /// Its key, and a wildcard that its value fits.
    Wildcard(&'t Pattern),
    /// Its key alone.
    Key,
}

impl<R> Default for Node<R> {
    fn default() -> Self {
        Self { rule: None, keys: HashMap::new() }
    }
}

impl<R> Default for Values<R> {
    fn default() -> Self {
        Self {
            exact: HashMap::new(),
            wild: Vec::new(),
            written: HashSet::new(),
            prefixes: BTreeMap::new(),
            any: None,
        }
    }
}

impl<R> Node<R> {
    /// Where an entry leads, and by what.
    #[must_use]
    pub fn child(&self, key: &str, value: &str) -> Option<(&Self, By<'_>)> {
        let values = self.keys.get(key)?;
        if let Some(node) = values.exact.get(value) {
            return Some((node, By::Value));
        }
        if let Some((pattern, node)) = values.wildcard(value) {
            return Some((node, By::Wildcard(pattern)));
        }
        values.any.as_deref().map(|node| (node, By::Key))
    }

    /// Has it children of that key?
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// The rule that all these entries lead to.
    pub fn find<'e>(&self, entries: impl IntoIterator<Item = (&'e str, &'e str)>) -> Option<&R> {
        let mut node = self;
        for (key, value) in entries {
            (node, _) = node.child(key, value)?;
        }
        node.rule.as_ref()
    }

    /// Puts a child where an entry of that key and value leads; without a value, any other.
    ///
    /// # Errors
    /// There is one already. The node is given back.
    pub fn insert(&mut self, key: &str, value: Option<&str>, node: Self) -> Result<(), Self> {
        let values = self.keys.entry(key.into()).or_default();
        match value.map(|value| (value, Pattern::new(value))) {
            None if values.any.is_some() => return Err(node),
            None => values.any = Some(Box::new(node)),
            Some((value, None)) if values.exact.contains_key(value) => return Err(node),
            Some((value, None)) => {
                values.exact.insert(value.into(), node);
            }
            Some((_, Some(pattern))) if !values.written.insert(pattern.text.clone()) => return Err(node),
            Some((_, Some(pattern))) => {
                let prefix = pattern.prefix();
                let alike =
                    values.prefixes.entry(prefix.len()).or_default().entry(prefix.into()).or_default();
                alike.push(values.wild.len());
                values.wild.push((pattern, node));
            }
        }
        Ok(())
    }

    /// Every rule below and at this node.
    pub fn rules(&self) -> Vec<&R> {
        let mut rules = Vec::new();
        let mut nodes = vec![self];
        while let Some(node) = nodes.pop() {
            rules.extend(&node.rule);
            for values in node.keys.values() {
                nodes.extend(values.exact.values());
                nodes.extend(values.wild.iter().map(|(_, node)| node));
                nodes.extend(values.any.as_deref());
            }
        }
        rules
    }
}

impl<R> Values<R> {
    fn wildcard(&self, value: &str) -> Option<&(Pattern, Node<R>)> {
        let mut first = usize::MAX;
        for (&length, alike) in &self.prefixes {
            // Past the value's end, or within a character of it, no prefix of that length is.
            let Some(places) = value.get(..length).and_then(|start| alike.get(start)) else { continue };
            let fits = |place: &usize| self.wild.get(*place).is_some_and(|(pattern, _)| pattern.fits(value));
            let earlier = places.iter().copied().take_while(|place| *place < first);
            first = earlier.into_iter().find(fits).unwrap_or(first);
        }
        self.wild.get(first)
    }
}

/// A value with wildcards: each `*` stands for any run of characters, also for none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    first: usize,
    last: usize,
}

impl Pattern {
    /// `None` for a text without a wildcard.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        Some(Self { first: text.find('*')?, last: text.rfind('*')?, text: text.into() })
    }

    /// As it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What a value has to begin with.
    fn prefix(&self) -> &str {
        self.text.get(..self.first).unwrap_or_default()
    }

    /// Does the value fit?
    #[must_use]
    pub fn fits(&self, value: &str) -> bool {
        let Some(rest) = value.strip_prefix(self.prefix()) else { return false };
        let suffix = self.text.get(self.last + 1..).unwrap_or_default();
        let Some(mut rest) = rest.strip_suffix(suffix) else { return false };
        // Whatever stands between wildcards is met as early as it can be: what comes after has the most room.
        let between = self.text.get(self.first..self.last).unwrap_or_default();
        for part in between.split('*') {
            match rest.find(part) {
                Some(at) => rest = rest.get(at + part.len()..).unwrap_or_default(),
                None => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fits(pattern: &str, value: &str) -> bool {
        Pattern::new(pattern).unwrap().fits(value)
    }

    #[test]
    fn a_wildcard_is_any_run_of_characters_anywhere() {
        for (pattern, value, is_met) in [
            ("*", "", true),
            ("*", "a/b", true),
            ("foo*", "foo", true),
            ("foo*", "foobar/x", true),
            ("foo*", "fo", false),
            ("foo*", "Foo", false),
            ("*.jpg", "a/b.jpg", true),
            ("*.jpg", ".jpg", true),
            ("*.jpg", "a.jpg.png", false),
            ("/v*/users/*", "/v1/users/", true),
            ("/v*/users/*", "/v1/users", false),
            ("a*b*c", "abc", true),
            ("a*b*c", "acbbc", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
            ("**", "", true),
            ("a**a", "aa", true),
            ("a**a", "a", false),
            ("*é*", "caféx", true),
        ] {
            assert_eq!(fits(pattern, value), is_met, "{pattern} {value}");
        }
        assert_eq!(Pattern::new("plain"), None);
    }

    fn tree(children: &[(&str, Option<&str>, u32)]) -> Node<u32> {
        let mut tree = Node::default();
        for (key, value, rule) in children {
            tree.insert(key, *value, Node { rule: Some(*rule), ..Node::default() }).unwrap();
        }
        tree
    }

    #[test]
    fn the_value_then_the_first_wildcard_then_the_key() {
        let tree = tree(&[
            ("path", None, 0),
            ("path", Some("/a*"), 1),
            ("path", Some("/ab*"), 2),
            ("path", Some("*c"), 3),
            ("path", Some("/abc"), 4),
        ]);
        for (value, rule) in [("/abc", 4), ("/abx", 1), ("/a", 1), ("/xc", 3), ("/ac", 1), ("x", 0)] {
            assert_eq!(tree.find([("path", value)]), Some(&rule), "{value}");
        }
        assert_eq!(tree.find([("other", "x")]), None);
        assert_eq!(tree.find([]), None);
        assert_eq!(tree.find([("path", "x"), ("path", "x")]), None);
    }

    #[test]
    fn nothing_goes_in_twice() {
        let mut tree = tree(&[("k", None, 0), ("k", Some("v"), 1), ("k", Some("v*"), 2)]);
        for value in [None, Some("v"), Some("v*")] {
            assert!(tree.insert("k", value, Node::default()).is_err());
        }
        assert_eq!(tree.rules().len(), 3);
    }

    /// Straight from the definition.
    fn naive(pattern: &[char], value: &[char]) -> bool {
        match pattern.split_first() {
            None => value.is_empty(),
            Some(('*', rest)) => (0..=value.len()).any(|skip| naive(rest, &value[skip..])),
            Some((c, rest)) => value.first() == Some(c) && naive(rest, &value[1..]),
        }
    }

    proptest! {
        #[test]
        fn wildcards_mean_what_they_say(pattern in "[abé*]{0,8}\\*[abé*]{0,8}", value in "[abé]{0,12}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            prop_assert_eq!(fits(&pattern, &value), naive(&chars(&pattern), &chars(&value)));
        }

        #[test]
        fn the_first_of_all_wildcards_that_fit_holds(
            patterns in prop::collection::btree_set("[abé]{0,3}\\*[ab*]{0,3}", 1..12),
            value in "[abé]{0,6}",
        ) {
            let patterns: Vec<_> = patterns.into_iter().rev().collect();
            let mut tree = Node::default();
            for (place, pattern) in patterns.iter().enumerate() {
                tree.insert("k", Some(pattern), Node { rule: Some(place), ..Node::default() }).unwrap();
            }
            let first = patterns.iter().position(|pattern| fits(pattern, &value));
            prop_assert_eq!(tree.find([("k", value.as_str())]).copied(), first);
        }
    }
}
