//! Manifests and the names in them, over any bytes: nothing panics, and accepted ones keep the rules.

use std::collections::BTreeSet;

use permafrost_protocol::manifest::{CheckpointRef, Manifest, ManifestError, check_job_name};
use prost::Message;

/// Checks all properties of manifests.
pub fn check(input: &[u8]) {
    if let Ok(manifest) = Manifest::decode_checked(input) {
        match manifest.encode_checked() {
            Ok(bytes) => assert_eq!(Manifest::decode_checked(&bytes), Ok(manifest.clone())),
            // Reading stays possible where an older manifest recorded such an option; a restore refuses it.
            Err(error) => assert!(
                matches!(error, ManifestError::RestoreOption(_)),
                "accepted, then refused: {error}"
            ),
        }
        let mut names = BTreeSet::new();
        for image in &manifest.images {
            assert!(!image.name.contains('/') && !image.name.is_empty() && image.name != "..");
            assert!(names.insert(&image.name), "{} twice", image.name);
            assert_eq!(image.map_root.len(), 32);
        }
        for space in &manifest.spaces {
            assert!(space.space_id().is_ok());
            assert_eq!(space.map_root.len(), 32);
        }
    } else if let Ok(manifest) = Manifest::decode(input) {
        assert!(
            manifest.encode_checked().is_err(),
            "both sides refuse the same"
        );
    }
    if let Ok(text) = std::str::from_utf8(input) {
        if let Ok(reference) = text.parse::<CheckpointRef>() {
            assert_eq!(reference.to_string(), text);
        }
        if check_job_name(text).is_ok() {
            assert!((1..=200).contains(&text.len()) && !text.contains("//") && !text.contains('@'));
            assert!(
                text.split('/')
                    .all(|component| !matches!(component, "" | "." | ".."))
            );
            assert!(
                text.parse::<CheckpointRef>()
                    .is_ok_and(|reference| reference.generation.is_none())
            );
        }
    }
}
