//! `include/jumbo.h` is what cbindgen makes of the source.

use std::path::Path;

#[test]
fn the_header_is_that_of_the_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    let bindings = cbindgen::Builder::new()
        .with_crate(folder)
        .with_config(config);
    bindings.generate().unwrap().write(&mut made);
    let header = folder.join("include/jumbo.h");
    if made != std::fs::read(&header).unwrap_or_default() {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("jumbo.h");
        std::fs::write(&new, made).unwrap();
        panic!("hint: cp {} {}", new.display(), header.display());
    }
}
