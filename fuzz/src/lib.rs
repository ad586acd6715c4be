//! What is done with any bytes there are. Nothing may panic, and:
//!
//! - [`rules`]: a file is loaded, and then decides, or it is said in which line it is wrong;
//! - [`matcher`]: a descriptor meets the rule that a naive matcher finds;
//! - [`requests`]: each call over gRPC is answered by what can be, and the next one too;
//! - [`leases`]: no sequence of Borrows, Returns and calls gives out more than the bucket had.

mod leases;
mod matcher;
mod requests;
mod rules;

pub use leases::leases;
pub use matcher::matcher;
pub use requests::requests;
pub use rules::rules;

/// Bytes, a few at a time.
struct Reader<'d>(&'d [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Of an alphabet in which texts meet each other.
    fn text(&mut self) -> String {
        (0..self.byte() % 4).map(|_| ["a", "b", "é", "*"][usize::from(self.byte() % 4)]).collect()
    }
}
