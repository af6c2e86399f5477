//! Statics apart from those of [`one_page!`](jumbo_sys::one_page).

/// Declares large zeroed statics in a section of their own: the small ones stay on few pages.
macro_rules! table {
    ($($static:tt)*) => { crate::one_page! { @".bss.jumbo_tables" $($static)* } };
}
pub(crate) use table;
