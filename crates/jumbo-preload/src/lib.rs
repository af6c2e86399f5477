//! The library that `jumbo run` loads into a program.
