//! What a server says when it starts: where it listens, what it decides by, and how to try it.

use std::net::SocketAddr;
use tollgate_server::config::Config;

/// Prints to standard output. `grpc` is the real address, whatever port was asked for.
pub(crate) fn print(config: &Config, grpc: SocketAddr) {
    println!("tollgate {}", env!("CARGO_PKG_VERSION"));
    println!("  grpc     {grpc}");
    println!("  http     {} (nothing listens there yet)", config.server.http);
    println!("  store    {}", config.store.url);
    println!("  rules    {}", config.source);
    for rule in config.rules.iter() {
        println!("  class    {rule}");
    }
    let class = config.rules.iter().find(|rule| rule.limited.is_some()).map_or("", |rule| &rule.class);
    let body = format!(r#"{{"key":"alice","class":"{}"}}"#, class.escape_default());
    println!("try      grpcurl -plaintext -d '{body}' {grpc} tollgate.v1.RateLimiter/ShouldRateLimit");
}
