//! Memory given back after the program's end, by a sibling process that shares it: [`State`].

mod state;

pub use state::State;
