//! The page of what a fork writes, in the parent and in the child: [`fork_page!`](crate::fork_page).
//!
//! After fork(2) the first write to a page is a fault and a copy, in both processes. The locks of the fork protocol and the
//! state that a child resets therefore lie side by side, in a section of their own, which fits one base page. Large tables
//! stay elsewhere: a [`Lock`](crate::sync::Lock) on [`Apart`](crate::sync::Apart) has only its word here. A child reads
//! nothing else, unless a flag in this page says so: a page that the parent has never touched is a fault, too.

use core::sync::atomic::AtomicU8;

/// Declares statics that lie in the page.
#[macro_export]
#[doc(hidden)]
macro_rules! fork_page {
    ($($static:tt)*) => { $crate::in_section! { "jumbo_fork"; $($static)* } };
}

/// Declares large statics of zeroes, apart from the small ones: these then lie on few pages, which each fork copies.
macro_rules! table {
    ($($static:tt)*) => { $crate::in_section! { ".bss.jumbo_tables"; $($static)* } };
}
pub(crate) use table;

/// Declares statics in a section of that name.
#[macro_export]
#[doc(hidden)]
macro_rules! in_section {
    ($section:literal; $($(#[$attribute:meta])* $visibility:vis static $name:ident: $type:ty = $value:expr;)*) => {$(
        $(#[$attribute])*
        #[allow(unsafe_code, reason = "the section holds statics of Rust alone")]
        // SAFETY: it is an ordinary section of data, or of zeroes; where it lies has no meaning to the linker.
        #[unsafe(link_section = $section)]
        $visibility static $name: $type = $value;
    )*};
}

/// Has the section begin at a page.
#[repr(align(4096))]
struct Start([AtomicU8; 0]);

fork_page! {
    #[used]
    static START: Start = Start([]);
}
