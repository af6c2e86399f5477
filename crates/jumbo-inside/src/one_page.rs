//! The page of what a fork writes, in the parent and in the child: [`one_page!`](crate::one_page).
//!
//! After fork(2) the first write to a page is a fault and a copy, in both processes. The locks of the fork protocol and the
//! state that a child resets therefore lie side by side, in a section of their own, which fits one base page. Large tables
//! stay elsewhere: a [`Lock`](crate::sync::Lock) on [`Apart`](crate::sync::Apart) has only its word here. A child reads
//! nothing else, unless a flag in this page says so: a page that the parent has never touched is a fault, too.

use core::sync::atomic::AtomicU8;

/// Declares statics that lie in the page; after `@`, in another section.
#[macro_export]
#[doc(hidden)]
macro_rules! one_page {
    (@$section:literal $($(#[$attribute:meta])* $visibility:vis static $name:ident: $type:ty = $value:expr;)*) => {$(
        $(#[$attribute])*
        #[allow(unsafe_code, reason = "the section holds statics of Rust alone")]
        // SAFETY: it is an ordinary section of data, or of zeroes; where it lies has no meaning to the linker.
        #[unsafe(link_section = $section)]
        $visibility static $name: $type = $value;
    )*};
    ($($static:tt)*) => { $crate::one_page! { @"jumbo_fork" $($static)* } };
}

/// Declares large statics of zeroes, apart from the small ones: these then lie on few pages, which each fork copies.
macro_rules! table {
    ($($static:tt)*) => { crate::one_page! { @".bss.jumbo_tables" $($static)* } };
}
pub(crate) use table;

/// Has the section begin at a page.
#[repr(align(4096))]
struct Start([AtomicU8; 0]);

one_page! {
    #[used]
    static START: Start = Start([]);
}
