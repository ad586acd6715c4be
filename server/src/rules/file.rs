//! The rules file.
