//! A descriptor meets the rule that a naive matcher finds.

use super::Reader;
use tollgate_server::rules::matcher::Node;

/// A tree of rules as naive as can be.
#[derive(Debug)]
struct Naive {
    rule: Option<u8>,
    children: Vec<(String, Option<String>, Naive)>,
}

impl Naive {
    fn read(from: &mut Reader<'_>, depth: u8) -> Self {
        let rule = Some(from.byte()).filter(|rule| rule % 2 == 0);
        let count = if depth == 0 { 0 } else { from.byte() % 6 };
        let mut children: Vec<(String, Option<String>, Self)> = Vec::new();
        for _ in 0..count {
            let (key, value) = (from.text(), (!from.byte().is_multiple_of(4)).then(|| from.text()));
            let child = Self::read(from, depth - 1);
            if !children.iter().any(|(other, its, _)| (other, its) == (&key, &value)) {
                children.push((key, value, child));
            }
        }
        Self { rule, children }
    }

    fn node(&self) -> Node<u8> {
        let mut node = Node::default();
        node.rule = self.rule;
        for (key, value, child) in &self.children {
            assert!(node.insert(key, value.as_deref(), child.node()).is_ok(), "{key:?} {value:?} twice");
            assert!(node.insert(key, value.as_deref(), child.node()).is_err(), "{key:?} {value:?}");
        }
        node
    }

    fn find(&self, entries: &[(String, String)]) -> Option<u8> {
        let Some(((key, value), rest)) = entries.split_first() else { return self.rule };
        let of_key = || self.children.iter().filter(|(its, ..)| its == key);
        let wild = |pattern: &Option<String>| pattern.as_ref().is_some_and(|it| it.contains('*'));
        let exact = of_key().find(|(_, its, _)| !wild(its) && its.as_ref() == Some(value));
        let (_, _, child) = exact
            .or_else(|| {
                of_key().find(|(_, its, _)| wild(its) && its.as_ref().is_some_and(|its| fits(its, value)))
            })
            .or_else(|| of_key().find(|(_, its, _)| its.is_none()))?;
        child.find(rest)
    }
}

fn fits(pattern: &str, value: &str) -> bool {
    let Some(first) = pattern.chars().next() else { return value.is_empty() };
    let rest = &pattern[first.len_utf8()..];
    if first == '*' {
        let ends = value.char_indices().map(|(at, _)| at).chain([value.len()]);
        return ends.into_iter().any(|at| fits(rest, &value[at..]));
    }
    value.strip_prefix(first).is_some_and(|value| fits(rest, value))
}

/// A tree, and then descriptors.
pub fn matcher(data: &[u8]) {
    let mut from = Reader(data);
    let naive = Naive::read(&mut from, 3);
    let node = naive.node();
    for _ in 0..8 {
        let entries: Vec<_> = (0..from.byte() % 4).map(|_| (from.text(), from.text())).collect();
        let found = node.find(entries.iter().map(|(key, value)| (key.as_str(), value.as_str())));
        assert_eq!(found.copied(), naive.find(&entries), "{entries:?} in {naive:?}");
    }
}
