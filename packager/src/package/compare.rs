// SPDX-License-Identifier: Apache-2.0
//! Explaining why two builds of the same inputs gave two images: by layer, and by file in it.

use std::{collections::BTreeMap, path::Path};

use crate::{
    error::{Class, Failure, Result},
    layout::{
        Identity,
        read::{self, Found, Layout},
    },
};

/// Ok if both are the same image; else the failure lists the differences.
pub fn explain(one: &Identity, one_dir: &Path, two: &Identity, two_dir: &Path) -> Result<()> {
    if one.config == two.config && one.manifest == two.manifest {
        return Ok(());
    }
    let (first, second) = (read::read(one_dir)?, read::read(two_dir)?);
    let mut differences = Vec::new();
    if one.diff_ids.len() != two.diff_ids.len() {
        differences.push(format!("{} layers and {} layers", one.diff_ids.len(), two.diff_ids.len()));
    }
    for (index, (a, b)) in one.diff_ids.iter().zip(&two.diff_ids).enumerate() {
        if a != b {
            let names = files_that_differ(&layer(&first, index)?, &layer(&second, index)?);
            differences.push(format!(
                "layer {index}: {}",
                if names.is_empty() {
                    "owners, modes of directories, or order".into()
                } else {
                    names.join(", ")
                }
            ));
        }
    }
    if differences.is_empty() {
        differences.push("the configuration (environment, labels, history)".into());
    }
    let failure = Failure::new(Class::Verify, "two builds of the same inputs gave two images")
        .why(differences.join("; "));
    Err(failure
        .next("make these files independent of time, randomness and the network, or pin what they come from"))
}

fn layer(layout: &Layout, index: usize) -> Result<BTreeMap<String, Found>> {
    let one = Layout {
        identity: layout.identity.clone(),
        config: layout.config.clone(),
        tag: layout.tag.clone(),
        layers: vec![layout.layers[index].clone()],
    };
    Ok(read::files_below(&one, "", "")?.0)
}

fn files_that_differ(a: &BTreeMap<String, Found>, b: &BTreeMap<String, Found>) -> Vec<String> {
    let mut names: Vec<String> = a
        .iter()
        .filter(|(path, found)| b.get(*path) != Some(found))
        .map(|(path, _)| format!("/{path}"))
        .collect();
    names.extend(b.keys().filter(|path| !a.contains_key(*path)).map(|path| format!("/{path}")));
    names.sort();
    names.truncate(20);
    names
}
