//! One page for all that a fork writes, in parent and child: [`one_page!`](crate::one_page).
//!
//! After fork(2) the first write to a page costs a fault and a copy, in both processes. So the
//! locks of the fork protocol and the state that a child resets share one section, which fits a
//! base page. Of a large table only the word of its lock on
//! `jumbo_inside::sync::Apart` is here. A child reads another page only if a flag in this one
//! says so: even a read of a page that the parent never touched is a fault.

use core::sync::atomic::AtomicU8;

/// Declares statics in the page, or after `@` in another section.
#[macro_export]
#[doc(hidden)]
macro_rules! one_page {
    (@$section:literal $($(#[$attribute:meta])* $visibility:vis static $name:ident: $type:ty = $value:expr;)*) => {$(
        $(#[$attribute])*
        #[allow(unsafe_code, reason = "the section holds only statics of Rust")]
        // SAFETY: an ordinary section of data or zeroes; its place has no meaning to the linker.
        #[unsafe(link_section = $section)]
        $visibility static $name: $type = $value;
    )*};
    ($($static:tt)*) => { $crate::one_page! { @"jumbo_fork" $($static)* } };
}

/// Aligns the section to a page.
#[repr(align(4096))]
struct Start([AtomicU8; 0]);

one_page! {
    #[used]
    static START: Start = Start([]);
}
