// SPDX-License-Identifier: Apache-2.0
//! `serve --download`: the pinned weights into the Hugging Face cache, where they are not complete there.

use flux2::snapshot::{SNAPSHOT_VARIABLE, find};
use hub::{Kind, Settings, Want, bar::Bar};

use crate::{
    config::Config,
    exit::{Exit, StartError},
};

/// The diffusers layout. The repositories hold the transformer a second time, as one file that nothing here reads.
const PATTERNS: [&str; 6] =
    ["model_index.json", "scheduler/", "text_encoder/", "tokenizer/", "transformer/", "vae/"];

/// Downloads what is missing. A checkpoint that is named is the user's own and left alone; one that is complete needs
/// no network, whoever downloaded it.
///
/// # Errors
/// [`StartError`] with the exit code of the failure's kind.
pub async fn weights(config: &Config) -> Result<(), StartError> {
    let named = config.checkpoint.is_some()
        || std::env::var_os(SNAPSHOT_VARIABLE).is_some_and(|value| !value.is_empty());
    let spec = config.model.spec();
    let complete = || {
        let found = find(spec, None).ok();
        found.is_some_and(|found| flux2::pipeline::check(&found, config.text_encoder().as_deref()).is_empty())
    };
    if named || complete() {
        return Ok(());
    }
    let want = Want {
        repo: spec.repository.into(),
        revision: spec.revision.into(),
        allow: PATTERNS.map(Into::into).into(),
        ignore: spec.unneeded_files.iter().map(ToString::to_string).collect(),
        ..Want::default()
    };
    let settings = Settings::from_environment().map_err(|error| failed(&error))?;
    hub::fetch(&settings, &[want], &Bar::new(settings.progress)).await.map_err(|error| failed(&error))?;
    Ok(())
}

fn failed(error: &hub::Error) -> StartError {
    let exit = match error.kind {
        Kind::Usage => Exit::Usage,
        Kind::Network => Exit::Address,
        Kind::Auth => Exit::Auth,
        Kind::Disk => Exit::Storage,
        Kind::Verification => Exit::Verification,
        Kind::Other => Exit::Failure,
    };
    let next = if error.next.is_empty() { String::new() } else { format!("; {}", error.next) };
    StartError::new(exit, format!("{error}{next}"))
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsString, fs};

    use flux2::spec::ALL;

    #[test]
    fn the_model_looks_where_the_download_puts_it() {
        let root = tempfile::tempdir().expect("dir");
        for ((name, _), spec) in
            hub::settings::CACHES.into_iter().flat_map(|cache| ALL.iter().map(move |spec| (cache, spec)))
        {
            let variable = |asked: &str| (asked == name).then(|| OsString::from(root.path().join(name)));
            let folder = hub::cache::Cache::new(&hub::settings::cache(variable), spec.repository);
            let snapshot = folder.snapshot(spec.revision);
            fs::create_dir_all(&snapshot).expect("snapshot");
            fs::write(snapshot.join("model_index.json"), "{}").expect("marker");
            assert_eq!(flux2::snapshot::find_with(spec, None, variable).expect("found"), snapshot, "{name}");
        }
    }
}
