//! A client of Tollgate.
