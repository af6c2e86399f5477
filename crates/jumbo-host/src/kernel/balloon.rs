//! Free memory of a virtual machine that goes back to its host: [`reporting`].
//!
//! With free page reporting (Documentation/mm/free_page_reporting.rst, Linux 5.7) the kernel names free blocks to the balloon device, which
//! has the host take their memory back, two seconds after they became free. The next touch of such a block waits until the host gives
//! it memory again. Huge pages are always cut from such blocks.
//!
//! What is looked at is the virtio balloon, whose features are in sysfs. A host of another kind shows nothing there: what a first touch
//! costs can be measured all the same.
//!
//! Invariant: a device that does not say that it reports does not report.

use serde::Serialize;

use super::thp::optional;
use super::{FileError, Root};

const DEVICES: &str = "sys/bus/virtio/devices";
/// The ID of a memory balloon (virtio 1.2, section 5.5).
const BALLOON: u32 = 5;
/// VIRTIO_BALLOON_F_REPORTING (virtio 1.2, section 5.5.3).
const F_REPORTING: usize = 5;

/// A device through which free memory goes back to the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reporting {
    /// Its name in /sys/bus/virtio/devices.
    pub device: String,
}

impl Reporting {
    /// The file that says so: the features that device and driver agreed on, a digit each, the first bit first.
    pub fn file(&self) -> String {
        format!("/{}", features(&self.device))
    }
}

fn features(device: &str) -> String {
    format!("{DEVICES}/{device}/features")
}

/// The device through which free memory goes back to the host; `None` where there is none, as on a machine that is not virtual.
///
/// # Errors
/// [`FileError`] where a file is there and cannot be read or understood.
pub fn reporting(root: &Root) -> Result<Option<Reporting>, FileError> {
    for device in optional(root.list(DEVICES))?.unwrap_or_default() {
        let file = format!("{DEVICES}/{device}/device");
        // A device may be unplugged meanwhile.
        let Some(text) = optional(root.read(&file))? else {
            continue;
        };
        let text = text.trim();
        let id = text.strip_prefix("0x").unwrap_or(text);
        let id = u32::from_str_radix(id, 16)
            .map_err(|_| root.misread(&file, format!("`{text}` where an ID was expected")))?;
        if id != BALLOON {
            continue;
        }
        let features = optional(root.read(features(&device)))?;
        if features.is_some_and(|bits| bits.as_bytes().get(F_REPORTING) == Some(&b'1')) {
            return Ok(Some(Reporting { device }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake;

    /// The device that reports, of devices with an ID and features.
    fn found(devices: &[(&str, &str)]) -> Option<String> {
        let (_folder, root) = fake::host(&[]);
        for (index, (id, features)) in devices.iter().enumerate() {
            fake::write(&root, &format!("{DEVICES}/virtio{index}/device"), id);
            fake::write(
                &root,
                &format!("{DEVICES}/virtio{index}/features"),
                features,
            );
        }
        let reporting = reporting(&root).unwrap()?;
        assert!(reporting.file().starts_with("/sys/bus/virtio"));
        Some(reporting.device)
    }

    #[test]
    fn the_balloon_reports_whose_sixth_feature_is_set() {
        let (with, without) = ("0110010100\n", "0110100100\n");
        assert_eq!(found(&[("0x0005\n", with)]).as_deref(), Some("virtio0"));
        assert_eq!(found(&[("0x0005\n", without)]), None);
        assert_eq!(found(&[("0x0005\n", "01100")]), None);
        assert_eq!(found(&[]), None);
        // That bit of another device means another thing.
        let disk = ("0x0002\n", with);
        assert_eq!(found(&[disk]), None);
        let devices = [disk, ("0x0005\n", without), ("0x0005\n", with)];
        assert_eq!(found(&devices).as_deref(), Some("virtio2"));
    }

    #[test]
    fn what_is_no_id_is_an_error_with_its_file() {
        let (_folder, root) = fake::host(&[("sys/bus/virtio/devices/virtio0/device", "balloon\n")]);
        let error = reporting(&root).unwrap_err().to_string();
        assert!(
            error.contains("virtio0/device") && error.contains("`balloon`"),
            "{error}"
        );
    }
}
