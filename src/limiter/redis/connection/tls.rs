//! TLS with certificates that the application hands in.

/// Certificates and a key as PEM.
#[derive(Clone, Default)]
pub(in crate::limiter::redis) struct Pem {
    /// Certificates of the authorities that are trusted instead of the system's.
    pub(in crate::limiter::redis) authorities: Option<Vec<u8>>,
    pub(in crate::limiter::redis) identity: Option<Identity>,
}

/// The certificate that the limiter shows to servers that ask for one.
#[derive(Clone)]
#[cfg_attr(
    not(any(
        feature = "fred-rustls",
        feature = "fred-rustls-ring",
        feature = "redis-rs-rustls",
        feature = "redis-rs-rustls-ring"
    )),
    allow(dead_code, reason = "without rustls it is refused")
)]
pub(in crate::limiter::redis) struct Identity {
    /// The certificate, followed by the certificates between it and the authority.
    pub(in crate::limiter::redis) certificates: Vec<u8>,
    pub(in crate::limiter::redis) key: Vec<u8>,
}

impl Pem {
    /// Returns whether the application handed in nothing.
    pub(in crate::limiter::redis) fn is_empty(&self) -> bool {
        self.authorities.is_none() && self.identity.is_none()
    }
}

/// Installs the cryptography provider of the enabled feature for the process, unless the process has a
/// provider. rustls would do so itself, but panics if the application enabled both providers and chose none.
pub(super) fn choose_provider() {
    #[cfg(any(feature = "fred-rustls-ring", feature = "redis-rs-rustls-ring"))]
    let _ = rustls::crypto::ring::default_provider().install_default(); // the process has one
    #[cfg(all(
        any(feature = "fred-rustls", feature = "redis-rs-rustls"),
        not(any(feature = "fred-rustls-ring", feature = "redis-rs-rustls-ring"))
    ))]
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default(); // the process has one
}

/// Reads the certificates and the key. The process must already have a provider.
///
/// # Errors
/// Returns an error if a certificate or the key cannot be used. The error quotes neither the certificates nor the
/// key, because a key is a secret.
#[cfg(any(
    feature = "fred-rustls",
    feature = "fred-rustls-ring",
    feature = "redis-rs-rustls",
    feature = "redis-rs-rustls-ring"
))]
pub(super) fn read(pem: &Pem) -> Result<rustls::ClientConfig, crate::limiter::redis::error::RedisError> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ClientConfig, RootCertStore};

    use super::failure::misconfigured;

    let certificates = |option: &str, pem: &[u8]| {
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        let read = read.map_err(|_| misconfigured(format!("{option}: the certificates cannot be read as PEM")))?;
        match read.is_empty() {
            true => Err(misconfigured(format!(
                "{option}: there is no certificate in PEM, which begins with -----BEGIN CERTIFICATE-----"
            ))),
            false => Ok(read),
        }
    };
    let Some(authorities) = &pem.authorities else {
        return Err(misconfigured(
            "tls_identity(…) needs tls_authorities(…): the authority of the server's certificate",
        ));
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates("tls_authorities", authorities)? {
        let unusable =
            |error: rustls::Error| misconfigured("tls_authorities: a certificate cannot be used").caused_by(error);
        roots.add(certificate).map_err(unusable)?;
    }
    let config = ClientConfig::builder().with_root_certificates(roots);
    let Some(identity) = &pem.identity else { return Ok(config.with_no_client_auth()) };
    let chain = certificates("tls_identity", &identity.certificates)?;
    let key = PrivateKeyDer::from_pem_slice(&identity.key)
        .map_err(|_| misconfigured("tls_identity: there is no private key in PEM, -----BEGIN PRIVATE KEY-----"))?;
    let unusable = |error| misconfigured("tls_identity: the key cannot be used with the certificate").caused_by(error);
    config.with_client_auth_cert(chain, key).map_err(unusable)
}
