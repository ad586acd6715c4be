//! `tollgate check`: are rules valid? And with `--explain`: which of them does a descriptor meet, and why?

use std::path::PathBuf;
use std::process::ExitCode;
use tollgate_server::clock::Clock;
use tollgate_server::config::{Config, ConfigError};
use tollgate_server::rules::domain::Domain;
use tollgate_server::rules::files::{Files, is_domain};
use tollgate_server::rules::matcher::By;

/// What `tollgate check` is told.
#[derive(clap::Args)]
pub(crate) struct Check {
    /// A configuration file, the file of a domain, or a folder with such files
    #[arg(value_name = "FILE")]
    path: PathBuf,
    /// Say which rule a descriptor meets and why, or where it stopped; a backslash before a comma that is part
    /// of a value
    #[arg(long, value_name = "DOMAIN/KEY=VALUE,…")]
    explain: Option<String>,
}

/// What is wrong is told without this program's name before it, so that each line begins with a place.
pub(crate) fn check(arguments: &Check) -> ExitCode {
    let path = &arguments.path;
    let places = if path.is_dir() || is_domain(path) {
        vec![path.clone()]
    } else {
        match Config::check(path) {
            Ok(config) => {
                println!("{}: valid, {} classes", path.display(), config.rules.iter().count());
                config.domains
            }
            Err(ConfigError::Faults(faults)) => {
                faults.iter().for_each(|fault| eprintln!("{fault}"));
                return ExitCode::FAILURE;
            }
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    };
    let files = Files::read(&places, &Files::default(), Clock::system().now());
    for (path, read) in files.iter().filter(|(_, read)| read.wrong.is_empty()) {
        if let Some(domain) = &read.domain {
            let rules = domain.tree.rules().len();
            println!("{}: valid, domain {:?}, {rules} rules", path.display(), domain.name);
        }
    }
    let mut code = ExitCode::SUCCESS;
    for wrong in files.wrong() {
        eprintln!("{wrong}");
        code = ExitCode::FAILURE;
    }
    if path.is_dir() && files.iter().next().is_none() {
        eprintln!("{}: no file that ends in .yaml or .yml", path.display());
        code = ExitCode::FAILURE;
    }
    if let Some(descriptor) = &arguments.explain {
        match explain(descriptor, &files) {
            Ok(lines) => lines.iter().for_each(|line| println!("{line}")),
            Err(wrong) => {
                eprintln!("--explain: {wrong}");
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

fn explain(descriptor: &str, files: &Files) -> Result<Vec<String>, String> {
    let (name, entries) = parse(descriptor)?;
    let Some(domain) = files.domains().find(|domain| domain.name == name) else {
        return Ok(vec![format!("no file is for the domain {name:?}: not limited")]);
    };
    Ok(walk(&domain, &entries))
}

type Entries = Vec<(String, String)>;

/// `domain/key=value,key2=value2`
fn parse(descriptor: &str) -> Result<(String, Entries), String> {
    let expected = || format!("expected DOMAIN/KEY=VALUE,KEY=VALUE…, got {descriptor:?}");
    // The first part ends at a slash, the others at commas; a backslash takes what a character means from it.
    let mut parts = vec![String::new()];
    let mut chars = descriptor.chars();
    while let Some(c) = chars.next() {
        let end = if parts.len() == 1 { '/' } else { ',' };
        let c = if c == '\\' { chars.next() } else { Some(c).filter(|c| *c != end) };
        match (c, parts.last_mut()) {
            (Some(c), Some(part)) => part.push(c),
            _ => parts.push(String::new()),
        }
    }
    let mut parts = parts.into_iter();
    let domain = parts.next().filter(|domain| !domain.is_empty()).ok_or_else(expected)?;
    let entry = |entry: String| {
        let (key, value) = entry.split_once('=').unwrap_or((&entry, ""));
        (!key.is_empty()).then(|| (key.to_owned(), value.to_owned()))
    };
    let entries: Option<Entries> = parts.map(entry).collect();
    let entries = entries.filter(|entries| !entries.is_empty()).ok_or_else(expected)?;
    Ok((domain, entries))
}

/// A line for each entry, and one for the end.
fn walk(domain: &Domain, entries: &[(String, String)]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut node = &domain.tree;
    for (key, value) in entries {
        let told = format!("{key}={value}");
        let Some((child, by)) = node.child(key, value) else {
            let stops = if node.has(key) { "no rule has this value" } else { "no rule has this key here" };
            lines.push(format!("{told}: {stops}"));
            lines.push("not limited".to_owned());
            return lines;
        };
        lines.push(match by {
            By::Value => format!("{told}: by its value"),
            By::Wildcard(pattern) => format!("{told}: by the wildcard {:?}", pattern.as_str()),
            By::Key => format!("{told}: by its key, whatever the value"),
        });
        node = child;
    }
    lines.push(match &node.rule {
        None => "the entries end at a node without a rate_limit: not limited".to_owned(),
        Some(rule) => {
            let path = &rule.path;
            let name = if rule.name.is_empty() { String::new() } else { format!(" ({})", rule.name) };
            match &rule.meter {
                None => format!("rule {path}{name}: unlimited"),
                Some(meter) => format!("rule {path}{name}: {meter}"),
            }
        }
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_read() {
        let read = |text: &str| parse(text).map(|(domain, entries)| format!("{domain} {entries:?}"));
        assert_eq!(read("edge/user=bob").unwrap(), r#"edge [("user", "bob")]"#);
        assert_eq!(read("edge/path=/a/b=c,user=").unwrap(), r#"edge [("path", "/a/b=c"), ("user", "")]"#);
        assert_eq!(read(r"a\/b/list=1\,2,user").unwrap(), r#"a/b [("list", "1,2"), ("user", "")]"#);
        for wrong in ["", "edge", "edge/", "/user=bob", "edge/=x", "edge/a=b,,c=d"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
