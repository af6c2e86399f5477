//! The measurements behind `jumbo bench`: each table a module, each round alternating.
