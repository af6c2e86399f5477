//! The `jumbo` command.

fn main() {}
