//! What a server says when it starts: where it listens, what it decides by, and how to try it.

use std::net::SocketAddr;
use tollgate_server::config::Config;

/// Prints to standard output. The addresses are the real ones, whatever port was asked for.
pub(crate) fn print(config: &Config, grpc: SocketAddr, http: SocketAddr) {
    println!("tollgate {}", env!("CARGO_PKG_VERSION"));
    println!("  grpc     {grpc}");
    println!("  http     {http}");
    println!("  store    {}", config.store.url);
    println!("  rules    {}", config.source);
    for rule in config.rules.iter() {
        println!("  class    {rule}");
    }
    for place in &config.domains {
        println!("  domains  {}", place.display());
    }
    // The first class that can be typed as it is, in JSON within a shell's quotes.
    let plain = |class: &str| class.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:/ ".contains(&b));
    let Some(class) = config.rules.iter().map(|rule| rule.class.as_str()).find(|class| plain(class)) else {
        return;
    };
    let body = format!(r#"{{"key":"alice","class":"{class}"}}"#);
    let by = if config.server.tls.is_some() { "-cacert CA" } else { "-plaintext" };
    println!("try      grpcurl {by} -d '{body}' {grpc} tollgate.v1.RateLimiter/ShouldRateLimit");
}
