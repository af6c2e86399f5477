//! Calls that free, move, copy or map by address: none compiles under `#![forbid(unsafe_code)]`.
//! Each compiles in an `unsafe` block, so `unsafe` is the only reason for the refusal.

macro_rules! refused {
    ($($name:ident: $call:literal,)*) => {$(
        #[doc = concat!(
            "```compile_fail,E0133\n#![forbid(unsafe_code)]\nuse jumbo_inside::*;\nlet _ = ", $call, ";\n```\n",
            // SAFETY: compiled, never run.
            "```no_run\nuse jumbo_inside::*;\nlet _ = unsafe { ", $call, " };\n```\n",
        )]
        const $name: () = ();
    )*};
}

refused! {
    COPY: "heap::copy(4096, 8192, 8)",
    RELEASE: "heap::release(4096)",
    RESIZE: "heap::resize(4096, 8192)",
    ROOM: "heap::room(4096)",
    MOVE_GROWN: "heap::maps::move_grown(4096, 4096, 8192)",
    FREE: "slab::free(core::ptr::null_mut(), 4096)",
    AFTER_FORK: "events::after_fork::<heap::Events>()",
    FORKED: "events::after_fork_child::<heap::Events>(1)",
    UNMAP: "gather::unmap(4096, 4096)",
    DROP_IN_PLACE: "gather::discard(4096, 4096)",
    TAKE: "gather::PendingFree::new().take(4096, 4096)",
    MOVE_MAPPING: "jumbo_sys::move_mapping(4096, 8192, 4096)",
    MOVE_UNITS: "jumbo_sys::move_units(4096, 8192, 4096, 4096, false)",
    MOVE_CUT: "heap::maps::move_cut(4096, 4096, 8192, None)",
    SYS_UNMAP: "jumbo_sys::unmap(4096, 4096)",
    REAPER: "reaper::prepare(1, &(4096..8192), false, core::ptr::null_mut())",
    UNLOCK: "sync::Lock::<u8>::new(0).release()",
}
