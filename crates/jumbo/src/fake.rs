//! Fake hosts for tests.

use std::fs;

use jumbo_sys::files::Root;

/// Creates a host with these files; drop of the folder removes it.
pub(crate) fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::at(folder.path());
    for (file, text) in files {
        let path = root.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    (folder, root)
}
