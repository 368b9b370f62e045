// SPDX-License-Identifier: Apache-2.0
//! What a reader needs to believe a package: what is in it (SPDX) and what it was made from (in-toto,
//! SLSA). Both stand beside the image and outside of its identity, and name no host and no local path.

pub mod slsa;
pub mod spdx;
