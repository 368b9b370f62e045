// SPDX-License-Identifier: Apache-2.0
//! Which proxy stands between here and an address, for messages: reqwest takes the same one from the same variables.

use reqwest::Url;

/// `the proxy of VARIABLE (host:port)`; none if the address is reached directly. A proxy's password is not shown.
pub fn of(url: &Url, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let set = |name: &str| {
        [name.to_owned(), name.to_lowercase()].into_iter().find_map(|name| {
            let value = variable(&name).filter(|value| !value.trim().is_empty())?;
            Some((name, value))
        })
    };
    let host = url.host_str()?;
    let (_, direct) = set("NO_PROXY").unwrap_or_default();
    if direct.split(',').any(|entry| covers(entry.trim(), host)) {
        return None;
    }
    let own = if url.scheme() == "https" { "HTTPS_PROXY" } else { "HTTP_PROXY" };
    let (name, value) = set(own).or_else(|| set("ALL_PROXY"))?;
    let place = if value.contains("://") { value } else { format!("http://{value}") };
    let place = Url::parse(&place).ok().and_then(|place| {
        let port = place.port_or_known_default().map(|port| format!(":{port}")).unwrap_or_default();
        Some(format!(" ({}{port})", place.host_str()?))
    });
    Some(format!("the proxy of {name}{}", place.unwrap_or_default()))
}

/// `*`, a host, or a domain with everything below it.
fn covers(entry: &str, host: &str) -> bool {
    let domain = entry.trim_start_matches('.');
    entry == "*" || (!domain.is_empty() && (host == domain || host.ends_with(&format!(".{domain}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_of_the_scheme_names_the_proxy_and_no_password() {
        let of = |url: &str, variables: &[(&str, &str)]| {
            let url = Url::parse(url).expect("a URL");
            of(&url, |name| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).into()))
        };
        let both = [("HTTPS_PROXY", "http://me:word@proxy:3128"), ("http_proxy", "plain:80")];
        assert_eq!(of("https://hub/x", &both).as_deref(), Some("the proxy of HTTPS_PROXY (proxy:3128)"));
        assert_eq!(of("http://hub/x", &both).as_deref(), Some("the proxy of http_proxy (plain:80)"));
        assert_eq!(of("https://hub/x", &[("http_proxy", "plain:80")]), None);
        assert!(of("https://hub/x", &[("ALL_PROXY", "socks5://all:1080")]).is_some());
        for direct in ["*", "hub.example", ".example", "other, example"] {
            let variables = [("HTTPS_PROXY", "p:1"), ("NO_PROXY", direct)];
            assert_eq!(of("https://hub.example/x", &variables), None, "{direct}");
        }
        assert!(of("https://hub.example/x", &[("HTTPS_PROXY", "p:1"), ("NO_PROXY", "ample")]).is_some());
    }
}
