// SPDX-License-Identifier: Apache-2.0
//! Which certificates are trusted, and how a refused one is told from a connection that failed.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};

/// The system's certificates (`SSL_CERT_FILE` and `SSL_CERT_DIR` name others), or Mozilla's where there are none.
pub fn config() -> Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(Kind::Network, "cannot set up TLS").why(error))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// True if the other side's certificate was refused: no repetition will change it.
pub fn distrusted(error: &reqwest::Error) -> bool {
    let mut inner: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = inner {
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let wrapped = wrapped.map(|error| error as &(dyn std::error::Error + 'static));
        if [Some(error), wrapped].into_iter().flatten().any(|error| {
            matches!(error.downcast_ref::<rustls::Error>(), Some(rustls::Error::InvalidCertificate(_)))
        }) {
            return true;
        }
        inner = wrapped.or_else(|| error.source());
    }
    false
}
