//! Real traffic, for tests that replay it: ten thousand requests of a public website. `data/README.md` says whose.

/// One line of the log.
pub(crate) struct Request {
    /// When, in seconds since the month began.
    pub(crate) at: u64,
    /// The address that it came from.
    pub(crate) client: &'static str,
    /// What it asked for.
    pub(crate) path: &'static str,
}

/// All of them, in order of time.
pub(crate) fn requests() -> Vec<Request> {
    let mut requests: Vec<_> = include_str!("data/access.log")
        .lines()
        .map(|line| parse(line).unwrap_or_else(|| panic!("no request: {line}")))
        .collect();
    requests.sort_by_key(|request| request.at);
    requests
}

/// The kind of call that a request is: what a page is made of, a page, or a feed.
pub(crate) fn class(path: &str) -> &'static str {
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let name = path.rsplit('/').next().unwrap_or_default();
    match name.rsplit_once('.') {
        Some((_, "css" | "gif" | "ico" | "jpg" | "js" | "png" | "woff")) => "asset",
        _ if query.contains("flav=") => "feed",
        _ => "page",
    }
}

/// `198.18.0.2 - - [17/May/2015:10:05:03 +0000] "GET /a/path HTTP/1.1" 200 203023`
fn parse(line: &'static str) -> Option<Request> {
    let (client, rest) = line.split_once(" - - [")?;
    let (time, rest) = rest.split_once(" +0000] \"")?;
    let path = rest.split(' ').nth(1)?;
    let (day, time) = time.split_once("/May/2015:")?;
    let mut at: u64 = day.parse().ok()?;
    for (part, most) in time.split(':').zip([24, 60, 60]) {
        at = at * most + part.parse::<u64>().ok()?;
    }
    Some(Request { at, client, path })
}

#[test]
fn the_log_is_read() {
    let requests = requests();
    assert_eq!(requests.len(), 10_000);
    let first = requests.first().unwrap();
    assert_eq!((first.at, first.client), (17 * 86_400 + 10 * 3600 + 5 * 60, "198.18.0.2"));
    let clients: std::collections::HashSet<_> = requests.iter().map(|request| request.client).collect();
    assert_eq!(clients.len(), 1753);
    let of = |wanted| requests.iter().filter(|request| class(request.path) == wanted).count();
    assert_eq!((of("asset"), of("page"), of("feed")), (5292, 3807, 901));
}
