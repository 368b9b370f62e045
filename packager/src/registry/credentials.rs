// SPDX-License-Identifier: Apache-2.0
//! Who pushes: what `docker login` left in Docker's configuration, in the file itself or with a credential helper.
//! Nothing of it is ever shown; a failure names the file or the helper.

use std::{env, fmt, path::PathBuf};

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;
use serde::Serialize;

use crate::error::{Class, Failure, Result};

/// Docker Hub's name in Docker's configuration.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// Where credentials came from; never what they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Docker's configuration, or a helper that it names.
    DockerConfig(PathBuf),
    /// There are none for this registry.
    Anonymous,
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DockerConfig(path) => write!(formatter, "the credentials of {}", path.display()),
            Self::Anonymous => formatter.write_str("no credentials"),
        }
    }
}

/// Credentials for one registry.
pub struct Credentials {
    /// What the client sends.
    pub(super) auth: RegistryAuth,
    /// Where it is from.
    pub source: Source,
}

impl Credentials {
    /// None.
    pub fn anonymous() -> Self {
        Self { auth: RegistryAuth::Anonymous, source: Source::Anonymous }
    }

    /// Of `DOCKER_CONFIG/config.json`, or `~/.docker/config.json`; anonymous if that has nothing for `host`.
    pub fn find(host: &str) -> Result<Self> {
        let Some(path) = config() else { return Ok(Self::anonymous()) };
        if !path.exists() {
            return Ok(Self::anonymous());
        }
        let server = if matches!(host, "docker.io" | "index.docker.io" | "registry-1.docker.io") {
            DOCKER_HUB
        } else {
            host
        };
        let shown = path.display().to_string();
        let failure =
            |what: String, why: &str, next: String| Err(Failure::new(Class::Auth, what).why(why).next(next));
        let log_in = || format!("log in again: docker login {host}");
        match docker_credential::get_credential(server) {
            Ok(DockerCredential::UsernamePassword(user, password)) => {
                Ok(Self { auth: RegistryAuth::Basic(user, password), source: Source::DockerConfig(path) })
            }
            Ok(DockerCredential::IdentityToken(_)) => failure(
                format!("{shown} has an identity token for {host}"),
                "this program sends a user's name with a password or access token only",
                format!("log in with an access token: docker login -u USER --password-stdin {host}"),
            ),
            Err(
                CredentialRetrievalError::NoCredentialConfigured | CredentialRetrievalError::ConfigNotFound,
            ) => Ok(Self::anonymous()),
            // Helpers report an absent entry as a failure, with this text.
            Err(CredentialRetrievalError::HelperFailure { stdout, .. })
                if stdout.contains("credentials not found") =>
            {
                Ok(Self::anonymous())
            }
            Err(CredentialRetrievalError::HelperFailure { helper, .. }) => failure(
                format!("the credential helper {helper} failed"),
                "it ended with an error",
                format!("run it by hand to see why: echo {server} | {helper} get >/dev/null"),
            ),
            Err(CredentialRetrievalError::HelperCommunicationError) => failure(
                format!("the credential helper for {host} cannot be run"),
                &format!("{shown} names it in credHelpers or credsStore"),
                "install the helper, or take it out of that file".into(),
            ),
            Err(CredentialRetrievalError::MalformedHelperResponse) => failure(
                format!("the credential helper for {host} gives no credentials"),
                "its answer is not of the helpers' protocol",
                log_in(),
            ),
            Err(CredentialRetrievalError::ConfigReadError) => failure(
                format!("{shown} cannot be read"),
                "it is not a Docker configuration",
                "correct or remove it".into(),
            ),
            Err(error) => {
                failure(format!("{shown} has no usable entry for {host}"), &error.to_string(), log_in())
            }
        }
    }
}

fn config() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let dir = set("DOCKER_CONFIG").or_else(|| set("HOME").map(|home| home.join(".docker")))?;
    Some(dir.join("config.json"))
}
