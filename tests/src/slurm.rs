//! A real Slurm for one test: `munged`, `slurmctld` and `slurmd` of one node, all in a PID namespace that ends with
//! the test, with two partitions, one of which preempts the other.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process;

/// Environment variable that names the directory under which Slurm's packages are unpacked; `/` for the system's.
pub const SLURM: &str = "PERMAFROST_SLURM";

/// Partition whose jobs are preempted.
pub const LOW: &str = "low";
/// Partition that preempts.
pub const HIGH: &str = "high";
/// Name of the cluster.
pub const CLUSTER: &str = "permafrost";

/// Time that Slurm's daemons may take to make the node usable.
const READY: Duration = Duration::from_secs(60);

/// Time that a job may take to reach an expected state.
const LIMIT: Duration = Duration::from_secs(90);

/// Lifetime of a credential, s: a requeued job waits as long before it starts again. This is the shortest that Slurm
/// accepts; the default is two minutes.
const CREDENTIAL_S: u32 = 5;

/// Installation of Slurm's programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// Root of the packages: `/`, or where `cargo xtask` has unpacked them.
    root: PathBuf,
}

impl Programs {
    /// Returns the programs at [`SLURM`], those of this machine, or those that `cargo xtask setup` has fetched. The
    /// search runs once a process.
    ///
    /// # Errors
    /// Says of each candidate why not.
    pub fn find() -> Result<Self, String> {
        static FOUND: OnceLock<Result<Programs, String>> = OnceLock::new();
        FOUND
            .get_or_init(|| {
                let mut reasons = Vec::new();
                let candidates = match std::env::var_os(SLURM) {
                    Some(root) => vec![root.into()],
                    None => vec![PathBuf::from("/"), fetched()],
                };
                for root in candidates {
                    let programs = Self { root };
                    match programs.check() {
                        Ok(()) => return Ok(programs),
                        Err(why) => reasons.push(why),
                    }
                }
                Err(reasons.join("; "))
            })
            .clone()
    }

    /// Checks that all required programs exist and start.
    ///
    /// # Errors
    /// Gives the reason in one line.
    pub fn check(&self) -> Result<(), String> {
        for (program, version) in [
            ("usr/sbin/munged", "--version"),
            ("usr/sbin/slurmctld-wlm", "-V"),
            ("usr/sbin/slurmd-wlm", "-V"),
        ] {
            let path = self.path(program);
            let started = self
                .command(program)
                .arg(version)
                .stdin(Stdio::null())
                .output()
                .map_err(|error| format!("{}: {error}", path.display()))?;
            if !started.status.success() {
                return Err(format!("{} {version}: {}", path.display(), started.status));
            }
        }
        // These say nothing, not even their version, without a cluster.
        for program in ["sbatch", "scancel", "scontrol", "sinfo"] {
            let path = self.path("usr/bin").join(program);
            if !path.is_file() {
                return Err(format!("{} is not there", path.display()));
            }
        }
        Ok(())
    }

    /// Returns the programs unpacked at `root`.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
        }
    }

    /// Writes scripts into `bin`: `start-slurm`, which starts the daemons of a cluster of one node with its files in
    /// `dir`, and one for each of Slurm's commands for users.
    ///
    /// # Errors
    /// A file cannot be written, or has a name that is not UTF-8.
    pub fn install(&self, dir: &Path, bin: &Path, grace: Duration, processors: u32) -> Result<()> {
        write_files(self, dir, grace, processors)?;
        let mut environment = format!("export SLURM_CONF='{}/slurm.conf'\n", dir.display());
        if self.is_fetched() {
            let libraries = self.libraries().map(|path| path.display().to_string());
            environment += &format!("export LD_LIBRARY_PATH='{}'\n", libraries.join(":"));
        }
        let write = |name: &str, script: String| {
            let path = bin.join(name);
            fs::write(&path, script).with_context(|| format!("write {name}"))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("make {name} executable"))
        };
        let mut set = "set --".to_owned();
        for argument in rig_arguments(self, dir) {
            set += &format!(" '{}'", argument.to_str().context("a path is not UTF-8")?);
        }
        write(
            "start-slurm",
            format!("#!/bin/sh\n{environment}{set}\n{RIG}"),
        )?;
        for program in ["sbatch", "scancel", "scontrol", "sinfo", "squeue"] {
            let path = self.path("usr/bin").join(program);
            write(
                program,
                format!("#!/bin/sh\n{environment}exec '{}' \"$@\"\n", path.display()),
            )?;
        }
        Ok(())
    }

    fn path(&self, program: &str) -> PathBuf {
        self.root.join(program)
    }

    fn is_fetched(&self) -> bool {
        self.root != Path::new("/")
    }

    /// Returns the directories of the packages' libraries, Slurm's own first.
    fn libraries(&self) -> [PathBuf; 3] {
        let arch = std::env::consts::ARCH;
        let of = |dir: &str| self.path(&format!("{dir}/{arch}-linux-gnu"));
        [of("usr/lib").join("slurm-wlm"), of("usr/lib"), of("lib")]
    }

    /// Returns a command for one of the programs, which can find the other programs that it starts.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.path(program));
        self.point(&mut command);
        command
    }

    fn point(&self, command: &mut Command) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = [self.path("usr/bin"), self.path("usr/sbin")];
        let all = own.into_iter().chain(std::env::split_paths(&path));
        if let Ok(all) = std::env::join_paths(all) {
            command.env("PATH", all);
        }
        if self.is_fetched()
            && let Ok(libraries) = std::env::join_paths(self.libraries())
        {
            command.env("LD_LIBRARY_PATH", libraries);
        }
    }
}

/// Returns the directory into which `cargo xtask` unpacks the packages.
#[must_use]
pub fn fetched() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/slurm/root")
}

/// Returns Slurm for a test.
///
/// # Panics
/// There is none: a test of what it does must not pass without it.
#[must_use]
pub fn for_test(test: &str) -> Programs {
    Programs::find().unwrap_or_else(|why| {
        panic!("{test} needs Slurm: {why}; `cargo xtask setup` fetches it, or install slurmctld, slurmd, slurm-client and munge")
    })
}

/// A running cluster of one node. When it is dropped, everything ends, its jobs too.
#[derive(Debug)]
pub struct Slurm {
    programs: Programs,
    dir: PathBuf,
    rig: Child,
}

impl Slurm {
    /// Starts the cluster, with all its files in `dir`. Preempted jobs have `grace` as their grace time. Its node has so
    /// many processors: as many jobs of one processor each run at once.
    ///
    /// # Errors
    /// With what the daemons say when the node does not get usable.
    pub fn start(
        programs: &Programs,
        dir: &Path,
        grace: Duration,
        processors: u32,
    ) -> Result<Self> {
        write_files(programs, dir, grace, processors)?;
        let rig = rig(programs, dir)?;
        let slurm = Self {
            programs: programs.clone(),
            dir: dir.to_path_buf(),
            rig,
        };
        process::wait_for("an idle node of Slurm", READY, || {
            if !process::is_alive(slurm.rig.id()) {
                bail!("Slurm has ended:\n{}", slurm.logs());
            }
            let said = slurm.say("sinfo", &["--noheader", "--format=%T"]);
            Ok(said
                .is_ok_and(|state| state.trim().starts_with("idle"))
                .then_some(()))
        })
        .with_context(|| slurm.logs())?;
        Ok(slurm)
    }

    /// Submits a batch script, with further options of sbatch. Returns the job's number.
    ///
    /// # Errors
    /// sbatch refuses it.
    pub fn submit(&self, partition: &str, options: &[&str], script: &str) -> Result<u32> {
        let path = self.dir.join("script");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).context("write the script")?;
        let output = format!("--output={}", self.dir.join("out/%j").display());
        let mut arguments = vec!["--parsable", "--partition", partition, "--open-mode=append"];
        arguments.push(&output);
        arguments.extend(options);
        let path = path.to_string_lossy();
        arguments.push(&path);
        let said = self.say("sbatch", &arguments)?;
        said.trim()
            .parse()
            .with_context(|| format!("sbatch says {said:?}"))
    }

    /// Returns the output of a job so far.
    #[must_use]
    pub fn output(&self, job: u32) -> String {
        let path = self.dir.join("out").join(job.to_string());
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
    }

    /// Returns a field of a job, as `scontrol show job` prints it.
    ///
    /// # Errors
    /// slurmctld does not answer, or there is no such field.
    pub fn field(&self, job: u32, name: &str) -> Result<String> {
        let said = self.say("scontrol", &["show", "job", &job.to_string()])?;
        said.split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
            .map(str::to_owned)
            .with_context(|| format!("no {name} in {said}"))
    }

    /// Waits until a job is in a state.
    ///
    /// # Errors
    /// It is not within a minute and a half; with what the job has said.
    pub fn wait_for(&self, job: u32, state: &str) -> Result<()> {
        process::wait_for(&format!("job {job} to be {state}"), LIMIT, || {
            let is = self.field(job, "JobState")?;
            Ok((is == state).then_some(()))
        })
        .with_context(|| {
            format!(
                "job {job} is {:?}; it says:\n{}\n{}",
                self.field(job, "JobState"),
                self.output(job),
                self.logs()
            )
        })
    }

    /// Sends a signal to a job's batch script alone.
    ///
    /// # Errors
    /// scancel refuses.
    pub fn signal(&self, job: u32, signal: &str) -> Result<()> {
        let signal = format!("--signal={signal}");
        self.say("scancel", &["--batch", &signal, &job.to_string()])
            .map(drop)
    }

    /// Cancels a job.
    ///
    /// # Errors
    /// scancel refuses.
    pub fn cancel(&self, job: u32) -> Result<()> {
        self.say("scancel", &[&job.to_string()]).map(drop)
    }

    /// Runs one of Slurm's programs for users and returns its output.
    ///
    /// # Errors
    /// With what it said when it fails.
    pub fn say(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output = self
            .programs
            .command(&format!("usr/bin/{program}"))
            .args(arguments)
            .env("SLURM_CONF", self.dir.join("slurm.conf"))
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run {program}"))?;
        if !output.status.success() {
            bail!(
                "{program} {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn logs(&self) -> String {
        ["rig.log", "munged.log", "slurmctld.log", "slurmd.log"]
            .map(|name| format!("{name}:\n{}\n", crate::daemon::tail(&self.dir.join(name))))
            .concat()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // The namespace's first process dies with it, and everything with that.
        let _ = self.rig.kill();
        let _ = self.rig.wait();
    }
}

/// Writes key and configuration of a cluster of one node into `dir`.
fn write_files(programs: &Programs, dir: &Path, grace: Duration, processors: u32) -> Result<()> {
    for sub in ["state", "spool", "run", "out"] {
        fs::create_dir_all(dir.join(sub)).with_context(|| format!("create {sub}"))?;
    }
    let key = dir.join("munge.key");
    fs::write(&key, munge_key()?).context("write munge's key")?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).context("protect munge's key")?;
    fs::write(
        dir.join("slurm.conf"),
        configuration(programs, dir, grace, processors)?,
    )
    .context("write slurm.conf")
}

/// Starts the three daemons, and ends when they do. Its arguments are those of [`rig_arguments`].
const RIG: &str = "\
    \"$1\" --foreground --force --key-file=\"$4/munge.key\" --socket=\"$4/munge.sock\" --pid-file=\"$4/run/munged.pid\" \
        --log-file=\"$4/munged.log\" --seed-file=\"$4/munged.seed\" &\n\
    while ! [ -S \"$4/munge.sock\" ]; do sleep 0.05; done\n\
    \"$2\" -D -f \"$4/slurm.conf\" &\n\
    \"$3\" -D -f \"$4/slurm.conf\" -d \"$5\" -N \"$6\" &\n\
    wait\n";

/// Returns the programs of the daemons, the cluster's directory, slurmstepd and the node's name.
fn rig_arguments(programs: &Programs, dir: &Path) -> Vec<std::ffi::OsString> {
    let daemons = ["munged", "slurmctld-wlm", "slurmd-wlm"];
    let daemons = daemons.map(|program| programs.path(&format!("usr/sbin/{program}")));
    let mut arguments: Vec<std::ffi::OsString> = daemons.map(Into::into).into();
    arguments.push(dir.into());
    arguments.push(programs.path("usr/sbin/slurmstepd-wlm").into());
    arguments.push(host_name().into());
    arguments
}

/// Starts the three daemons in a PID namespace: slurmstepd leaves its parent, and could not be found otherwise.
fn rig(programs: &Programs, dir: &Path) -> Result<Child> {
    let log = File::create(dir.join("rig.log")).context("create the log")?;
    let mut command = Command::new("unshare");
    command.args([
        "--pid",
        "--fork",
        "--kill-child=SIGKILL",
        "--mount-proc",
        "--",
    ]);
    command.args(["sh", "-c", RIG, "sh"]);
    command.args(rig_arguments(programs, dir));
    programs.point(&mut command);
    command
        .env("SLURM_CONF", dir.join("slurm.conf"))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log)
        .spawn()
        .context("start Slurm")
}

/// Returns the first part of this machine's name, by which slurmctld identifies itself.
fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    name.split('.').next().unwrap_or(&name).to_owned()
}

fn munge_key() -> Result<Vec<u8>> {
    use std::io::Read as _;
    let mut key = vec![0; 128];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut key))
        .context("make munge's key")?;
    Ok(key)
}

fn configuration(
    programs: &Programs,
    dir: &Path,
    grace: Duration,
    processors: u32,
) -> Result<String> {
    // Open at once, so they differ.
    let free = || TcpListener::bind("127.0.0.1:0").context("find a free port");
    let (control, node) = (free()?, free()?);
    let port = |listener: &TcpListener| listener.local_addr().map(|address| address.port());
    let host = host_name();
    let grace_s = grace.as_secs();
    let plugins = if programs.is_fetched() {
        let [own, ..] = programs.libraries();
        format!("PluginDir={}", own.display())
    } else {
        String::new()
    };
    Ok(format!(
        "ClusterName={CLUSTER}\n\
         SlurmctldHost={host}(127.0.0.1)\n\
         SlurmctldPort={control_port}\n\
         SlurmdPort={node_port}\n\
         SlurmUser=root\n\
         SlurmdUser=root\n\
         {plugins}\n\
         AuthType=auth/munge\n\
         CredType=cred/munge\n\
         AuthInfo=socket={dir}/munge.sock,cred_expire={CREDENTIAL_S}\n\
         StateSaveLocation={dir}/state\n\
         SlurmdSpoolDir={dir}/spool\n\
         SlurmctldPidFile={dir}/run/slurmctld.pid\n\
         SlurmdPidFile={dir}/run/slurmd.pid\n\
         SlurmctldLogFile={dir}/slurmctld.log\n\
         SlurmdLogFile={dir}/slurmd.log\n\
         SlurmctldDebug=debug\n\
         SlurmdDebug=debug\n\
         ProctrackType=proctrack/linuxproc\n\
         TaskPlugin=task/none\n\
         JobAcctGatherType=jobacct_gather/none\n\
         SwitchType=switch/none\n\
         MpiDefault=none\n\
         SelectType=select/cons_tres\n\
         SelectTypeParameters=CR_Core\n\
         SchedulerType=sched/backfill\n\
         SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0\n\
         PreemptType=preempt/partition_prio\n\
         PreemptMode=REQUEUE\n\
         SlurmctldParameters=preempt_send_user_signal\n\
         JobRequeue=1\n\
         KillWait=5\n\
         ReturnToService=2\n\
         NodeName={host} NodeAddr=127.0.0.1 CPUs={processors} State=UNKNOWN\n\
         PartitionName={LOW} Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_s}\n\
         PartitionName={HIGH} Nodes=ALL PriorityTier=10 PreemptMode=OFF\n",
        control_port = port(&control).context("read a port")?,
        node_port = port(&node).context("read a port")?,
        dir = dir.display(),
    ))
}
