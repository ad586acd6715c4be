//! As who gRPC is served: certificates from files, which are read again when they change.

use crate::config::ServerTls;
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;

/// No file of certificates is larger, in bytes.
const LARGEST: u64 = 1 << 20;

/// A certificate, its key, and whom callers must be known by. Connections have those that held when they began.
pub struct Identity {
    files: ServerTls,
    texts: Mutex<Texts>,
    config: ArcSwap<ServerConfig>,
}

#[derive(PartialEq, Eq)]
struct Texts {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Identity {
    /// That in these files.
    ///
    /// # Errors
    /// What is wrong with them, without quoting any of it.
    pub fn read(files: ServerTls) -> Result<Self, String> {
        let texts = Texts::read(&files)?;
        let config = texts.config(&files)?.into();
        Ok(Self { files, texts: Mutex::new(texts), config })
    }

    /// Reads the files again. True if there is something new, for connections that begin from now on.
    ///
    /// # Errors
    /// As [`read`](Self::read); then what held before does.
    pub fn reload(&self) -> Result<bool, String> {
        // What was a pipe has been read to its end: whoever reads it again waits.
        if self.files().any(|file| file.exists() && !file.is_file()) {
            return Ok(false);
        }
        let mut known = self.texts.lock();
        let texts = Texts::read(&self.files)?;
        if texts == *known {
            return Ok(false);
        }
        self.config.store(texts.config(&self.files)?);
        *known = texts;
        Ok(true)
    }

    /// The files that it is in.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let ServerTls { cert, key, client_ca } = &self.files;
        [Some(cert), Some(key), client_ca.as_ref()].into_iter().flatten().map(AsRef::as_ref)
    }

    /// What makes a connection that begins now one by TLS.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        self.config.load_full().into()
    }
}

impl Texts {
    fn read(files: &ServerTls) -> Result<Self, String> {
        let text = |setting, path: &Path| {
            let mut text = Vec::new();
            let read = File::open(path).and_then(|file| file.take(LARGEST).read_to_end(&mut text));
            read.map(|_| text).map_err(|error| wrong(setting, path, &format!("can not be read: {error}")))
        };
        Ok(Self {
            cert: text("cert", &files.cert)?,
            key: text("key", &files.key)?,
            client_ca: files.client_ca.as_ref().map(|ca| text("client_ca", ca)).transpose()?,
        })
    }

    fn config(&self, files: &ServerTls) -> Result<Arc<ServerConfig>, String> {
        let ring = Arc::new(ring::default_provider());
        let config = ServerConfig::builder_with_provider(ring.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong("cert", &files.cert, &error))?;
        let config = match self.client_ca.as_deref().zip(files.client_ca.as_deref()) {
            None => config.with_no_client_auth(),
            Some((text, path)) => {
                let mut authorities = RootCertStore::empty();
                for authority in certificates("client_ca", path, text)? {
                    authorities.add(authority).map_err(|error| wrong("client_ca", path, &error))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(authorities.into(), ring).build();
                config.with_client_cert_verifier(verifier.map_err(|error| wrong("client_ca", path, &error))?)
            }
        };
        let chain = certificates("cert", &files.cert, &self.cert)?;
        // What is wrong with a key is told in words that hold nothing of it.
        let key = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| wrong("key", &files.key, &"expected a private key in PEM"))?;
        let mut config =
            config.with_single_cert(chain, key).map_err(|error| wrong("key", &files.key, &error))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config.into())
    }
}

fn certificates(setting: &str, path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().unwrap_or_default();
    if all.is_empty() { Err(wrong(setting, path, &"expected certificates in PEM")) } else { Ok(all) }
}

fn wrong(setting: &str, path: &Path, why: &dyn fmt::Display) -> String {
    format!("server.tls.{setting}: {}: {why}", path.display())
}
