//! System calls that rustix lacks, behind functions that are safe to call.

mod anonymous;
mod numa;

pub(crate) use anonymous::{discard, memfd, name};
pub(crate) use numa::{PolicyMode, allowed_nodes, bind, local_node, memory_policy};
