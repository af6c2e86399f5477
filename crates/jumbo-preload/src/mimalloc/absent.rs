//! A library that was built without mimalloc: `--heap=mimalloc` is served as `--heap=on`.

use jumbo_inside::orders::PoolOrder;

pub(crate) const IS_THERE: bool = false;

pub(crate) fn divert(_pool: Option<PoolOrder>) {}

pub(crate) fn before_fork() {}

pub(crate) fn after_fork() {}

pub(crate) fn confine() {}

pub(crate) fn taken() -> usize {
    0
}
