//! Free page reporting of a virtual machine: [`reporting`].
//!
//! The kernel reports blocks to the balloon device two seconds after they became free
//! (Documentation/mm/free_page_reporting.rst, Linux 5.7). The host reclaims their memory. The next
//! touch of such a block waits for the host. All huge pages come from such blocks.
//!
//! Only the virtio balloon is detected, by its features in sysfs. On other hypervisors the cost of
//! a first touch can only be measured.

use serde::Serialize;

use super::{FileError, Root, optional};

const VIRTIO_DEVICES: &str = "sys/bus/virtio/devices";
/// Device ID of a memory balloon (virtio 1.2, section 5.5).
const VIRTIO_ID_BALLOON: u32 = 5;
/// Feature bit (virtio 1.2, section 5.5.3).
const VIRTIO_BALLOON_F_REPORTING: usize = 5;

/// A balloon device that reports free pages to the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reporting {
    /// Name in /sys/bus/virtio/devices.
    pub device: String,
}

impl Reporting {
    /// Path of the negotiated features, a digit for each bit, the first bit first.
    pub fn file(&self) -> String {
        format!("/{}", features(&self.device))
    }
}

fn features(device: &str) -> String {
    format!("{VIRTIO_DEVICES}/{device}/features")
}

/// Finds the balloon device that reports free pages; `None` where there is none.
pub fn reporting(root: &Root) -> Result<Option<Reporting>, FileError> {
    for device in optional(root.list(VIRTIO_DEVICES))?.unwrap_or_default() {
        let file = format!("{VIRTIO_DEVICES}/{device}/device");
        // A device may be unplugged meanwhile.
        let Some(text) = optional(root.read(&file))? else {
            continue;
        };
        let text = text.trim();
        let id = text.strip_prefix("0x").unwrap_or(text);
        let id = u32::from_str_radix(id, 16)
            .map_err(|_| root.misread(&file, format!("`{text}` where an ID was expected")))?;
        if id != VIRTIO_ID_BALLOON {
            continue;
        }
        let features = optional(root.read(features(&device)))?;
        let is_set = |bits: String| bits.as_bytes().get(VIRTIO_BALLOON_F_REPORTING) == Some(&b'1');
        if features.is_some_and(is_set) {
            return Ok(Some(Reporting { device }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake;

    /// The reporting device among devices with these IDs and features.
    fn found(devices: &[(&str, &str)]) -> Option<String> {
        let (_folder, root) = fake::host(&[]);
        for (index, (id, features)) in devices.iter().enumerate() {
            fake::write(&root, &format!("{VIRTIO_DEVICES}/virtio{index}/device"), id);
            fake::write(
                &root,
                &format!("{VIRTIO_DEVICES}/virtio{index}/features"),
                features,
            );
        }
        let reporting = reporting(&root).unwrap()?;
        assert!(reporting.file().starts_with("/sys/bus/virtio"));
        Some(reporting.device)
    }

    #[test]
    fn a_balloon_with_the_feature_bit_reports() {
        let (with, without) = ("0110010100\n", "0110100100\n");
        assert_eq!(found(&[("0x0005\n", with)]).as_deref(), Some("virtio0"));
        assert_eq!(found(&[("0x0005\n", without)]), None);
        assert_eq!(found(&[("0x0005\n", "01100")]), None);
        assert_eq!(found(&[]), None);
        // The bit has another meaning on other devices.
        let disk = ("0x0002\n", with);
        assert_eq!(found(&[disk]), None);
        let devices = [disk, ("0x0005\n", without), ("0x0005\n", with)];
        assert_eq!(found(&devices).as_deref(), Some("virtio2"));
    }

    #[test]
    fn an_invalid_id_is_an_error_with_its_file() {
        let (_folder, root) = fake::host(&[("sys/bus/virtio/devices/virtio0/device", "balloon\n")]);
        let error = reporting(&root).unwrap_err().to_string();
        assert!(
            error.contains("virtio0/device") && error.contains("`balloon`"),
            "{error}"
        );
    }
}
