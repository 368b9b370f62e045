// SPDX-License-Identifier: Apache-2.0
//! The name of an image in a registry: `HOST/REPO[:TAG]`. The host is always written: a name without one would go to
//! Docker Hub by custom, and a typing error must not publish anything there.

use std::net::Ipv4Addr;

use oci_client::Reference;

use crate::error::{Class, Failure, Result};

/// Where an image goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Host, with a port if there is one.
    pub host: String,
    /// Repository on that host.
    pub repository: String,
    /// Tag, if one was given.
    pub tag: Option<String>,
}

impl Target {
    /// Reads `HOST/REPO[:TAG]`.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |why: &str, next: &str| {
            Err(Failure::new(Class::Usage, format!("{text} is no place in a registry")).why(why).next(next))
        };
        let example = "write it as HOST/REPO[:TAG], for example ghcr.io/organisation/model:1.0";
        if text.contains("://") {
            return wrong("it is a URL", example);
        }
        let host = text.split_once('/').map_or("", |(host, _)| host);
        if !(host.contains(['.', ':']) || host == "localhost") {
            return wrong(
                "it does not begin with a host",
                "write docker.io/organisation/model for Docker Hub",
            );
        }
        let reference = match Reference::try_from(text) {
            Ok(reference) => reference,
            Err(error) => return wrong(&error.to_string(), example),
        };
        if reference.digest().is_some() {
            return wrong("it has a digest, which the image decides", example);
        }
        let tagged = text.rsplit('/').next().is_some_and(|last| last.contains(':'));
        Ok(Self {
            host: reference.registry().to_owned(),
            repository: reference.repository().to_owned(),
            tag: reference.tag().filter(|_| tagged).map(str::to_owned),
        })
    }

    /// Host and repository up to the last part: `image.registry` of the wire manifest.
    pub fn namespace(&self) -> String {
        match self.repository.rsplit_once('/') {
            Some((path, _)) => format!("{}/{path}", self.host),
            None => self.host.clone(),
        }
    }

    /// Last part of the repository: `image.repository` of the wire manifest.
    pub fn name(&self) -> &str {
        self.repository.rsplit('/').next().unwrap_or_default()
    }

    /// `HOST/REPO:TAG`.
    pub fn tagged(&self, tag: &str) -> String {
        format!("{}/{}:{tag}", self.host, self.repository)
    }

    /// `HOST/REPO@DIGEST`.
    pub fn pinned(&self, digest: &str) -> String {
        format!("{}/{}@{digest}", self.host, self.repository)
    }

    /// True for this machine, where engines speak plain HTTP without being told.
    pub fn is_local(&self) -> bool {
        let name = self.host.rsplit_once(':').map_or(self.host.as_str(), |(name, _)| name);
        name == "localhost" || name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> (String, String, Option<String>) {
        let target = Target::parse(text).expect("a target");
        (target.namespace(), target.name().to_owned(), target.tag)
    }

    #[test]
    fn host_namespace_name_and_tag_are_told_apart() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parts("ghcr.io/org/model:1.0"), ("ghcr.io/org".into(), "model".into(), some("1.0")));
        assert_eq!(parts("localhost:5000/model"), ("localhost:5000".into(), "model".into(), None));
        assert_eq!(parts("localhost/a/b/c"), ("localhost/a/b".into(), "c".into(), None));
        assert_eq!(parts("docker.io/org/model"), ("docker.io/org".into(), "model".into(), None));
    }

    #[test]
    fn what_is_no_target_is_refused_with_the_form() {
        let digest = format!("ghcr.io/org/model@sha256:{}", "0".repeat(64));
        for text in [
            "",
            "model",
            "org/model",
            "https://ghcr.io/org/model",
            "ghcr.io/Org/Model",
            "ghcr.io/",
            "ghcr.io/a:b c",
            &digest,
        ] {
            let failure = Target::parse(text).expect_err(text);
            assert_eq!(failure.class, Class::Usage, "{text}");
            assert!(!failure.why.is_empty() && !failure.next.is_empty(), "{text}");
        }
    }

    #[test]
    fn only_this_machine_is_local() {
        let local = |text: &str| Target::parse(text).expect("a target").is_local();
        assert!(local("localhost:5000/a") && local("127.0.0.1:5000/a") && local("127.1.2.3/a"));
        assert!(!local("ghcr.io/a") && !local("10.0.0.1:5000/a") && !local("localhost.example.org/a"));
    }
}
