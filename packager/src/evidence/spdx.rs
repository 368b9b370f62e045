// SPDX-License-Identifier: Apache-2.0
//! The bill of materials: SPDX 2.3, from Cargo.lock, the image's own Debian package list, and the wheel.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{pins::Lock, wire::Wire};

/// File name in the package.
pub const FILE: &str = "sbom.spdx.json";

/// A component of the image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Component {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Package URL.
    pub purl: String,
    /// SHA-256, where its source states one.
    pub sha256: Option<String>,
}

/// The document. `created` is the time of the build.
pub fn document(wire: &Wire, components: &[Component], created: &str) -> Value {
    let digest = wire.built("image_digest").trim_start_matches("sha256:");
    let image = json!({
        "SPDXID": "SPDXRef-image", "name": wire.name, "versionInfo": wire.container.image.tag, "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false, "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest}], "primaryPackagePurpose": "CONTAINER",
    });
    let mut packages = vec![image];
    let mut relationships = vec![
        json!({"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-image"}),
    ];
    for (index, component) in components.iter().enumerate() {
        let id = format!("SPDXRef-package-{index}");
        let mut package = json!({
            "SPDXID": id, "name": component.name, "versionInfo": component.version, "downloadLocation": "NOASSERTION",
            "filesAnalyzed": false, "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
            "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": component.purl}],
        });
        if let Some(sha256) = &component.sha256 {
            package["checksums"] = json!([{"algorithm": "SHA256", "checksumValue": sha256}]);
        }
        packages.push(package);
        relationships.push(json!({"spdxElementId": "SPDXRef-image", "relationshipType": "CONTAINS", "relatedSpdxElement": id}));
    }
    json!({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": wire.container.image.tag,
        "documentNamespace": format!("https://huggingface.co/{}/sbom/{digest}", wire.repo()),
        "creationInfo": {"created": created, "creators": [format!("Tool: packager-{}", wire.built("tt_model_version"))]},
        "packages": packages, "relationships": relationships,
    })
}

/// Crates of a Cargo.lock that come from a registry. The lock lists all platforms and test tools too: what
/// it names is an upper bound of what is linked.
pub fn crates(lock: &str) -> Vec<Component> {
    let mut found = Vec::new();
    for block in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let start = format!("{name} = \"");
            block.lines().find_map(|line| line.strip_prefix(&start)?.strip_suffix('"')).map(str::to_owned)
        };
        if let (Some(name), Some(version), Some(_)) = (field("name"), field("version"), field("source")) {
            found.push(Component {
                purl: format!("pkg:cargo/{name}@{}", version.replace('+', "%2B")),
                sha256: field("checksum"),
                name,
                version,
            });
        }
    }
    found
}

/// Installed packages of dpkg's status file.
pub fn debian(status: &str) -> Vec<Component> {
    let mut found = Vec::new();
    for block in status.split("\n\n") {
        let fields: BTreeMap<&str, &str> = block
            .lines()
            .filter(|line| !line.starts_with(' '))
            .filter_map(|line| line.split_once(": "))
            .collect();
        let installed = fields.get("Status").is_some_and(|status| status.ends_with(" installed"));
        if let (true, Some(name), Some(version)) = (installed, fields.get("Package"), fields.get("Version")) {
            let arch = fields.get("Architecture").unwrap_or(&"all");
            let encoded = version.replace('+', "%2B").replace(':', "%3A");
            found.push(Component {
                name: (*name).into(),
                version: (*version).into(),
                purl: format!("pkg:deb/debian/{name}@{encoded}?arch={arch}"),
                sha256: None,
            });
        }
    }
    found
}

/// The wheel of the lock.
pub fn wheel(lock: &Lock) -> Option<Component> {
    let wheel = lock.wheel.as_ref()?;
    let (name, version) = wheel.requirement.split_once("==")?;
    Some(Component {
        name: name.into(),
        version: version.into(),
        purl: format!("pkg:pypi/{name}@{version}"),
        sha256: Some(wheel.sha256.clone()),
    })
}
