// SPDX-License-Identifier: Apache-2.0
//! What can be typed.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{image::build::Builder, serve::Device};

const EXIT_CODES: &str = "Exit codes: 0 ok, 1 failure, 2 usage, 3 invalid manifest, 4 container engine, \
5 network or hub, 6 authentication or gated, 7 disk, 8 verification failed, 130 interrupted.";

/// Turn a manifest and its model code into a container package that others can trust.
#[derive(Debug, Parser)]
#[command(version, about, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub struct Cli {
    /// The manifest.
    #[arg(short, long, global = true, default_value = "manifest.yaml", value_name = "FILE")]
    pub manifest: PathBuf,
    /// Results and errors as JSON on stdout, for programs (packager help json).
    #[arg(long, global = true)]
    pub json: bool,
    /// No colours (also: NO_COLOR).
    #[arg(long, global = true)]
    pub no_color: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write a first manifest; asks for what the flags do not say.
    Init(InitArgs),
    /// Check the manifest and report every problem at once.
    Check,
    /// Print the JSON Schema of the manifest, for editors.
    Schema,
    /// Write manifest.lock: what the manifest's names stand for now.
    Pin(PinArgs),
    /// Say what would be built, what is missing, and why the image would change.
    Plan(BuildArgs),
    /// Build the image and write the package to build/<name>/.
    Build(BuildArgs),
    /// Print the model card of a package, computed from its manifest.
    Card {
        /// build/<name>.
        package: PathBuf,
    },
    /// Prove offline that a package (or an image layout) agrees with itself.
    Verify {
        /// build/<name>, or an image layout.
        package: PathBuf,
    },
    /// Download weights or a package from the Hub into its cache, and check every byte.
    Fetch(FetchArgs),
    /// Push a package to the Hub, or its image to a registry, and read back what was pushed.
    Push(PushArgs),
    /// Run a package as a consumer would, and wait until it answers.
    Serve(ServeArgs),
    /// Stop a served package and remove its container.
    Stop {
        /// build/<name>.
        package: PathBuf,
        /// The profile.
        #[arg(long)]
        profile: Option<String>,
    },
    /// Print both digests of a code tree.
    Digest {
        /// The directory.
        dir: PathBuf,
    },
    /// Print a shell's completions.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one for every command.
    Man {
        /// Directory to write to.
        dir: Option<PathBuf>,
    },
    /// Explain a topic (manifest, json) or a command.
    Help {
        /// `manifest`, `json` (what --json prints), or the name of a command.
        topic: Vec<String>,
    },
}

/// Answers of `init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// organisation/name on the Hub.
    #[arg(long)]
    pub repo: Option<String>,
    /// Repository of the weights.
    #[arg(long)]
    pub weights: Option<String>,
    /// Board label with a count: p100a, p150x4, n300.
    #[arg(long)]
    pub hardware: Option<String>,
    /// Directory or file that ships.
    #[arg(long)]
    pub code: Option<String>,
    /// Program that serves HTTP.
    #[arg(long)]
    pub server: Option<String>,
    /// Replace a manifest that exists.
    #[arg(long)]
    pub force: bool,
}

/// Options of `pin`.
#[derive(Debug, Args)]
pub struct PinArgs {
    /// Compare with manifest.lock and write nothing; a difference is a failure.
    #[arg(long)]
    pub check: bool,
    /// Ask no network; pin what is known on this machine.
    #[arg(long)]
    pub offline: bool,
    /// Directory with wheel files.
    #[arg(long, value_name = "DIR")]
    pub wheels: Option<PathBuf>,
    /// Use another base image for a build argument.
    #[arg(long, value_name = "ARG=IMAGE", value_parser = pair)]
    pub base_image: Vec<(String, String)>,
}

/// Options of `build` and `plan`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct BuildArgs {
    /// Directory that gets <name>/.
    #[arg(long, default_value = "build", value_name = "DIR")]
    pub out: PathBuf,
    /// Build although something floats; the card will say what.
    #[arg(long)]
    pub allow_unpinned: bool,
    /// Build a second time from scratch and compare the two images.
    #[arg(long)]
    pub twice: bool,
    /// Build although nothing changed.
    #[arg(long)]
    pub again: bool,
    /// Which builder of the engine to use.
    #[arg(long, value_enum, default_value_t)]
    pub builder: Builder,
    /// Use another base image for a build argument.
    #[arg(long, value_name = "ARG=IMAGE", value_parser = pair)]
    pub base_image: Vec<(String, String)>,
    /// Set a build argument; never a secret.
    #[arg(long, value_name = "ARG=VALUE", value_parser = pair)]
    pub build_arg: Vec<(String, String)>,
    /// Certificates that the builder stage needs to reach package registries; they stay in that stage.
    #[arg(long, value_name = "FILE")]
    pub build_ca: Option<PathBuf>,
    /// RUN steps use the host's network.
    #[arg(long)]
    pub host_network: bool,
    /// Give up when the engine says nothing for this long.
    #[arg(long, default_value_t = 60, value_name = "MINUTES")]
    pub idle_minutes: u64,
}

/// Options of `fetch`.
#[derive(Debug, Args)]
#[command(after_help = FETCH_HELP)]
pub struct FetchArgs {
    /// The weights that the manifest names, at the revisions of manifest.lock (the default).
    #[arg(long, conflicts_with = "package")]
    pub weights: bool,
    /// A package or any other repository of the Hub.
    #[arg(long, value_name = "REPO[@REVISION]")]
    pub package: Option<String>,
    /// Only paths that match; `*` crosses directories. Replaces the manifest's patterns.
    #[arg(long, value_name = "PATTERN")]
    pub include: Vec<String>,
    /// No path that matches. Replaces the manifest's patterns.
    #[arg(long, value_name = "PATTERN")]
    pub exclude: Vec<String>,
    /// Hash what is there already, too.
    #[arg(long)]
    pub verify: bool,
}

const FETCH_HELP: &str = "\
Files go to the Hugging Face cache, where every program of that family finds them. What is there is not downloaded \
again; what was cut goes on where it stopped, also after a killed process. Environment: HF_TOKEN or HF_TOKEN_PATH \
(sent to HF_ENDPOINT's host only), HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT, \
HF_HUB_DISABLE_PROGRESS_BARS, HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE.";

/// Options of `push`.
#[derive(Debug, Args)]
#[command(after_help = PUSH_HELP)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct PushArgs {
    /// build/<name>.
    pub package: PathBuf,
    /// Push to this repository of the Hub instead of the manifest's; the card's commands then name it.
    #[arg(long, value_name = "ORGANISATION/NAME", conflicts_with = "registry")]
    pub repo: Option<String>,
    /// Only the owners see the repository; a listed one is delisted.
    #[arg(long, conflicts_with_all = ["public", "publish", "registry"])]
    pub private: bool,
    /// Everybody sees the repository.
    #[arg(long, conflicts_with = "registry")]
    pub public: bool,
    /// Public, and listed in the catalogue; needs the card's performance and limitations.
    #[arg(long, conflicts_with = "registry")]
    pub publish: bool,
    /// The branch; made from main if it is not there.
    #[arg(long, value_name = "BRANCH", default_value = "main", conflicts_with = "registry")]
    pub revision: String,
    /// Push the image to this registry; without a tag it gets the first 12 digits of its id.
    #[arg(long, value_name = "HOST/REPO[:TAG]")]
    pub registry: Option<String>,
    /// Say what would be sent, with sizes; send and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Plain HTTP to a registry that is not on this machine.
    #[arg(long, requires = "registry")]
    pub plain_http: bool,
    /// Leave image/ out of the package once the registry has it.
    #[arg(long, requires = "registry")]
    pub drop_image: bool,
}

const PUSH_HELP: &str = "\
To the Hub: the package is proved, then token, repository and card are checked, then the large files are sent that the \
Hub lacks, then one commit shows the whole package and takes away what is stale in code/ and image/; it is read back, \
and what is wrong is put back. A new repository is private unless --public or --publish is given; of another one \
nobody sees more or less than before without a flag. Environment: HF_TOKEN or HF_TOKEN_PATH (a token that may write; \
sent to HF_ENDPOINT's host only), HF_ENDPOINT, HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE.

To a registry (--registry): only blobs that it lacks are sent. The tag moves last, after everything was read back, so \
a push that fails leaves the tag as it was and the package as it is; afterwards the package points at the registry. \
Credentials are those of `docker login`: DOCKER_CONFIG or ~/.docker/config.json, and the helpers it names. \
Environment: HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE, PACKAGER_REGISTRY_TIMEOUT (seconds of silence, 300).";

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// build/<name>.
    pub package: PathBuf,
    /// The profile; the default one if absent.
    #[arg(long)]
    pub profile: Option<String>,
    /// This port; otherwise the first free one from 20000.
    #[arg(long)]
    pub port: Option<u16>,
    /// `card`, or `cpu` for hosts without one.
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Print the command and run nothing.
    #[arg(long)]
    pub print: bool,
    /// Return when the container runs, before it is ready.
    #[arg(long)]
    pub detach: bool,
    /// Further arguments for the server.
    #[arg(last = true)]
    pub args: Vec<String>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    pair.filter(|(name, _)| !name.is_empty()).ok_or_else(|| "expected NAME=VALUE".into())
}
