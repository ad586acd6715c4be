//! What a call is limited by: what is often used as a key or a class. Any function of a request's head will do.

use http::HeaderName;
use http::request::Parts;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Longer keys are cut: what they share then is one bucket.
const LONGEST: usize = 256;

/// Who is at the other end of the connection. The server puts it into the extensions of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// The caller's address, from a [`Peer`], a [`SocketAddr`] or an [`IpAddr`] in the request's extensions. Of IPv6 it
/// is the network, `2001:db8:1:2::/64`: whoever has one has all addresses in it.
///
/// In axum, where the address is in a type of its own:
/// `|parts| Some(by::network(parts.extensions.get::<ConnectInfo<SocketAddr>>()?.ip()))`.
#[must_use]
pub fn address(parts: &Parts) -> Option<String> {
    let extensions = &parts.extensions;
    let peer =
        extensions.get::<Peer>().map(|peer| peer.0).or_else(|| extensions.get::<SocketAddr>().copied());
    peer.map(|peer| peer.ip()).or_else(|| extensions.get::<IpAddr>().copied()).map(network)
}

/// An address as a key: of IPv6 the network of 64 bits.
#[must_use]
pub fn network(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => {
            let network = Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX));
            format!("{network}/64")
        }
    }
}

/// The caller's address behind `proxies` proxies of one's own, from `X-Forwarded-For`: each of them has added the
/// address that it saw, so it is that many from the end. What stands before was written by anybody. Behind no proxy
/// it is the [`address`].
pub fn forwarded(proxies: usize) -> impl Fn(&Parts) -> Option<String> + Clone + Send + Sync + 'static {
    move |parts| {
        let Some(before) = proxies.checked_sub(1) else { return address(parts) };
        let fields = parts.headers.get_all("x-forwarded-for").iter().rev();
        let mut hops = fields.filter_map(|field| field.to_str().ok()).flat_map(|field| field.rsplit(','));
        let hop = hops.nth(before)?.trim();
        let address = hop.parse().ok().or_else(|| hop.parse::<SocketAddr>().ok().map(|hop| hop.ip()));
        address.map(network)
    }
}

/// The value of a header field, such as an API key.
pub fn header(name: HeaderName) -> impl Fn(&Parts) -> Option<String> + Clone + Send + Sync + 'static {
    move |parts| {
        let value = parts.headers.get(&name)?.to_str().ok()?;
        Some(value.get(..LONGEST).unwrap_or(value).to_owned()).filter(|value| !value.is_empty())
    }
}

/// What somebody before has found out, such as the user.
pub fn extension<T: Clone + Send + Sync + 'static>(
    name: impl Fn(&T) -> String + Clone + Send + Sync + 'static,
) -> impl Fn(&Parts) -> Option<String> + Clone + Send + Sync + 'static {
    move |parts| parts.extensions.get::<T>().map(&name)
}

/// A class for what is at or below a path, by the first one that matches.
pub fn path<P: Into<String>, C: Into<String>>(
    classes: impl IntoIterator<Item = (P, C)>,
) -> impl Fn(&Parts) -> Option<String> + Clone + Send + Sync + 'static {
    let classes: Vec<(String, String)> =
        classes.into_iter().map(|(path, class)| (path.into(), class.into())).collect();
    move |parts| {
        let path = parts.uri.path();
        classes.iter().find(|(below, _)| is_below(path, below)).map(|(_, class)| class.clone())
    }
}

fn is_below(path: &str, place: &str) -> bool {
    let place = place.strip_suffix('/').unwrap_or(place);
    path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Is it one of these paths, or below one that ends in `/*`?
pub(super) fn is_one_of(places: &[String], path: &str) -> bool {
    places.iter().any(|place| match place.strip_suffix("/*") {
        Some(place) => is_below(path, place),
        None => path == place,
    })
}
