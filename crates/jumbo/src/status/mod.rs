//! Snapshots of the host and of processes: what is huge, what is not, and why not.
