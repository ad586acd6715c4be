//! Certificates of a test's own.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use std::path::{Path, PathBuf};

/// An authority that nobody else knows.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "the authority of a test");
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Its own certificate.
    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for that name or address, and its key.
    pub(crate) fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.0).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// Files in that folder: its own certificate, one for that name, and the key of that.
    pub(crate) fn files(&self, folder: &Path, name: &str) -> [PathBuf; 3] {
        let (certificate, key) = self.sign(name);
        let files = ["ca", "cert", "key"].map(|kind| folder.join(format!("{name}.{kind}.pem")));
        for (file, text) in files.iter().zip([self.pem(), certificate, key]) {
            std::fs::write(file, text).unwrap();
        }
        files
    }
}
