//! Which rank a process is, as the launcher that started it says.

use super::partition::MOST_RANKS;
use crate::{Error, Result};
use std::env;

/// The place of this process among those that a launcher started together.
///
/// | | rank | ranks | rank on its machine | job |
/// |---|---|---|---|---|
/// | torchrun, by hand | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` | `TORCHELASTIC_RUN_ID` |
/// | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` | |
/// | mpirun of MPICH and Intel | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` | |
/// | Slurm's srun | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` | `SLURM_JOB_ID` |
///
/// The first row of which a rank or a size is set counts, and has to be complete. Where rank 0 listens is
/// `MASTER_ADDR` and `MASTER_PORT`; Slurm's default is the first machine of the job, and a port made of the
/// job's number. `CANDLE_QUANT_PORT` goes before `MASTER_PORT`. torchrun itself listens on the latter if it
/// sets `TORCHELASTIC_USE_AGENT_STORE=True`: then it is the port after it. `CANDLE_QUANT_JOB` goes before the
/// launcher's name of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    rank: usize,
    world_size: usize,
    local_rank: usize,
    job: String,
    host: String,
    port: u16,
}

/// Names the job, whatever the launcher is.
pub(super) const JOB_VARIABLE: &str = "CANDLE_QUANT_JOB";

/// The variables of one launcher.
struct Convention {
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    /// The same for all ranks, if there is one.
    job: Option<&'static str>,
}

const BY_HAND: Convention = Convention {
    rank: "RANK",
    world_size: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    job: Some("TORCHELASTIC_RUN_ID"),
};
const OPEN_MPI: Convention = Convention {
    rank: "OMPI_COMM_WORLD_RANK",
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    job: None,
};
const MPICH: Convention =
    Convention { rank: "PMI_RANK", world_size: "PMI_SIZE", local_rank: "MPI_LOCALRANKID", job: None };
const SLURM: Convention = Convention {
    rank: "SLURM_PROCID",
    world_size: "SLURM_NTASKS",
    local_rank: "SLURM_LOCALID",
    job: Some("SLURM_JOB_ID"),
};

/// Slurm comes last: mpirun and torchrun inside of a job inherit its variables, which count machines there.
const CONVENTIONS: [Convention; 4] = [BY_HAND, OPEN_MPI, MPICH, SLURM];

impl RankInfo {
    /// From the environment of this process.
    ///
    /// # Errors
    /// If variables are missing, no numbers, or contradict each other.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| env::var(name).ok())
    }

    /// From any variables; an empty one counts as missing.
    ///
    /// # Errors
    /// As those of [`from_env`](RankInfo::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variables =
            Variables(&|name| variable(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty()));
        let is_set = |convention: &&Convention| {
            variables.get(convention.rank).or(variables.get(convention.world_size)).is_some()
        };
        let Some(convention) = CONVENTIONS.iter().find(is_set) else {
            let expected = "RANK, WORLD_SIZE and LOCAL_RANK, or the variables of mpirun or srun";
            return Err(Error::mismatch("environment of a rank", expected, "none of them"));
        };
        let rank = variables.number(convention.rank)?;
        let world_size = variables.number(convention.world_size)?;
        if world_size > MOST_RANKS {
            return Err(unexpected(convention.world_size, format!("at most {MOST_RANKS}"), world_size));
        }
        if rank >= world_size {
            let expected = format!("less than {} = {world_size}", convention.world_size);
            return Err(unexpected(convention.rank, expected, rank));
        }
        variables.agree(rank, world_size)?;
        let local_rank = CONVENTIONS.iter().map(|other| other.local_rank);
        let local_rank = [convention.local_rank].into_iter().chain(local_rank);
        let local_rank =
            local_rank.clone().find(|name| variables.get(name).is_some()).unwrap_or(convention.local_rank);
        let info = Self {
            rank,
            world_size,
            local_rank: variables.number(local_rank)?,
            job: variables
                .get(JOB_VARIABLE)
                .or(convention.job.and_then(|name| variables.get(name)))
                .unwrap_or_default(),
            host: String::from("localhost"),
            port: 0,
        };
        if info.local_rank >= world_size {
            let expected = format!("less than {} = {world_size}", convention.world_size);
            return Err(unexpected(local_rank, expected, info.local_rank));
        }
        match world_size {
            1 => Ok(info),
            _ => Ok(Self { host: variables.host()?, port: variables.port()?, ..info }),
        }
    }

    /// Which rank this process is, from 0 on.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Which of the ranks on this machine it is, from 0 on.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The name of the job, which all ranks of a group have alike; empty if it has none.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Name or address of the machine of rank 0.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The TCP port on which rank 0 listens.
    pub fn port(&self) -> u16 {
        self.port
    }
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T> {
        let Some(text) = self.get(name) else { return Err(missing(name, "a number")) };
        text.parse().map_err(|_| unexpected(name, "a number", format!("{text:?}")))
    }

    /// A rank that was set by hand, and forgotten, is not that of mpirun.
    fn agree(&self, rank: usize, world_size: usize) -> Result<()> {
        for Convention { rank: name, world_size: size, .. } in [OPEN_MPI, MPICH] {
            if self.get(size) == Some(world_size.to_string()) {
                let other: usize = self.number(name)?;
                if other != rank {
                    return Err(unexpected(name, format!("{rank}, as other variables say"), other));
                }
            }
        }
        Ok(())
    }

    /// Whether srun has started the ranks: no other launcher has set any, or PMI, which srun speaks too, says the same.
    fn of_slurm(&self) -> bool {
        let set_by = |by: Convention| [by.rank, by.world_size].map(|name| self.get(name));
        let (nobody, slurm, pmi) = ([None, None], set_by(SLURM), set_by(MPICH));
        slurm != nobody
            && set_by(BY_HAND) == nobody
            && set_by(OPEN_MPI) == nobody
            && (pmi == nobody || pmi == slurm)
    }

    fn host(&self) -> Result<String> {
        let nodes = || {
            let list = self.get("SLURM_STEP_NODELIST").or(self.get("SLURM_JOB_NODELIST"))?;
            self.of_slurm().then(|| first_node(&list))
        };
        let host = self.get("MASTER_ADDR").or_else(nodes);
        host.ok_or_else(|| missing("MASTER_ADDR", "the name or address of the machine of rank 0"))
    }

    fn port(&self) -> Result<u16> {
        if self.get("CANDLE_QUANT_PORT").is_some() {
            return self.number("CANDLE_QUANT_PORT").and_then(|port| above_zero("CANDLE_QUANT_PORT", port));
        }
        if self.of_slurm() && self.get("MASTER_PORT").is_none() {
            // Below those that systems give to connections.
            let job: u64 = self.number("SLURM_JOB_ID")?;
            return Ok(u16::try_from(job % 12_000).unwrap_or_default() + 20_000);
        }
        let port = above_zero("MASTER_PORT", self.number("MASTER_PORT")?)?;
        match self.get("TORCHELASTIC_USE_AGENT_STORE").as_deref() {
            Some("True") => {
                port.checked_add(1).ok_or_else(|| unexpected("MASTER_PORT", "less than 65535", port))
            }
            _ => Ok(port),
        }
    }
}

fn above_zero(name: &str, port: u16) -> Result<u16> {
    match port {
        0 => Err(unexpected(name, "a port above 0", port)),
        port => Ok(port),
    }
}

fn unexpected(name: &str, expected: impl Into<String>, found: impl ToString) -> Error {
    Error::mismatch(format!("environment variable {name}"), expected, found.to_string())
}

fn missing(name: &str, expected: &str) -> Error {
    unexpected(name, expected, "nothing; it has to be set")
}

/// `gpu07` of `gpu[07-12,20],cpu1`.
fn first_node(list: &str) -> String {
    let mut node = String::new();
    let mut letters = list.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ',' => break,
            '[' => {
                let range: String = letters.by_ref().take_while(|&letter| letter != ']').collect();
                node.extend(range.split(['-', ',']).next());
            }
            _ => node.push(letter),
        }
    }
    node
}

#[cfg(test)]
mod tests {
    use super::RankInfo;
    use crate::Result;

    fn info(variables: &[(&str, &str)]) -> Result<RankInfo> {
        let find = |name: &str| variables.iter().rev().find(|(other, _)| *other == name);
        RankInfo::from_variables(|name| find(name).map(|(_, value)| value.to_string()))
    }

    #[track_caller]
    fn refused(variables: &[(&str, &str)], expected: &str) {
        let error = info(variables).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    fn expected(rank: usize, world_size: usize, local_rank: usize, host: &str, port: u16) -> RankInfo {
        RankInfo { rank, world_size, local_rank, job: String::new(), host: host.to_string(), port }
    }

    fn of_job(job: &str, info: RankInfo) -> RankInfo {
        RankInfo { job: job.to_string(), ..info }
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "gpu1"),
        ("MASTER_PORT", "29500"),
    ];
    const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "4000")];
    const MPI: [(&str, &str); 3] =
        [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "6"), ("OMPI_COMM_WORLD_LOCAL_RANK", "2")];
    const SLURM: [(&str, &str); 5] = [
        ("SLURM_PROCID", "9"),
        ("SLURM_NTASKS", "16"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "7012345"),
        ("SLURM_STEP_NODELIST", "gpu[007-012,20],cpu1"),
    ];

    #[test]
    fn every_launcher_is_understood() {
        assert_eq!(info(&TORCHRUN).unwrap(), expected(3, 8, 1, "gpu1", 29500));
        let elastic = [&TORCHRUN[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(info(&elastic).unwrap().port(), 29501);
        let own_port = [&elastic[..], &[("CANDLE_QUANT_PORT", "77")]].concat();
        assert_eq!(info(&own_port).unwrap().port(), 77);
        assert_eq!(info(&[&MPI[..], &MASTER].concat()).unwrap(), expected(5, 6, 2, "10.0.0.1", 4000));
        let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0")];
        assert_eq!(info(&[&mpich[..], &MASTER].concat()).unwrap(), expected(0, 2, 0, "10.0.0.1", 4000));
        // 7012345 mod 12000 = 4345
        let slurm = |host, port| of_job("7012345", expected(9, 16, 1, host, port));
        assert_eq!(info(&SLURM).unwrap(), slurm("gpu007", 24345));
        assert_eq!(info(&[&SLURM[..], &MASTER].concat()).unwrap(), slurm("10.0.0.1", 4000));
        // srun with the plugin pmi2, which is the default of some clusters: it names no job.
        let pmi = [("PMI_RANK", "9"), ("PMI_SIZE", "16")];
        let by_pmi = of_job("", slurm("gpu007", 24345));
        assert_eq!(info(&[&SLURM[..], &pmi].concat()).unwrap(), by_pmi);
    }

    #[test]
    fn jobs_have_the_names_that_their_launchers_give_them() {
        let job = |variables: &[&[(&str, &str)]]| info(&variables.concat()).unwrap().job().to_string();
        let (run, named) = ([("TORCHELASTIC_RUN_ID", "run 7")], [("CANDLE_QUANT_JOB", "mine")]);
        assert_eq!(job(&[&TORCHRUN]), "");
        assert_eq!(job(&[&TORCHRUN, &run]), "run 7");
        // Ranks of torchrun may be in several jobs of Slurm.
        assert_eq!(job(&[&SLURM, &TORCHRUN]), "");
        assert_eq!(job(&[&SLURM, &run]), "7012345");
        let mpi = [&MPI[..], &MASTER].concat();
        for launcher in [&TORCHRUN[..], &mpi, &SLURM] {
            assert_eq!(job(&[launcher, &run, &named]), "mine");
        }
    }

    #[test]
    fn what_runs_inside_of_a_slurm_job_is_not_slurm() {
        // srun has started one task on each machine, and those the ranks.
        let inside = [&SLURM[..], &MPI, &MASTER].concat();
        assert_eq!(info(&inside).unwrap(), expected(5, 6, 2, "10.0.0.1", 4000));
        assert_eq!(info(&[&SLURM[..], &TORCHRUN].concat()).unwrap(), expected(3, 8, 1, "gpu1", 29500));
        refused(&[&SLURM[..], &MPI].concat(), "MASTER_ADDR: expected the name or address");
    }

    #[test]
    fn one_rank_needs_no_master() {
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")];
        assert_eq!(info(&alone).unwrap(), expected(0, 1, 0, "localhost", 0));
    }

    #[test]
    fn missing_variables_are_named() {
        refused(&[], "expected RANK, WORLD_SIZE and LOCAL_RANK, or the variables of mpirun or srun");
        for (name, _) in TORCHRUN {
            let rest: Vec<_> = TORCHRUN.iter().copied().filter(|(other, _)| *other != name).collect();
            refused(&rest, &format!("environment variable {name}: expected"));
            refused(&[&rest[..], &[(name, " ")]].concat(), "found nothing; it has to be set");
        }
        // One launcher's rank is not completed by another's size.
        refused(
            &[&[("RANK", "1")], &MPI[..], &MASTER].concat(),
            "WORLD_SIZE: expected a number, found nothing",
        );
        refused(&SLURM[..4], "MASTER_ADDR");
        refused(&[&SLURM[..3], &SLURM[4..]].concat(), "SLURM_JOB_ID");
    }

    #[test]
    fn contradictions_and_other_than_numbers_are_refused() {
        let with = |name, value| [&TORCHRUN[..], &[(name, value)]].concat();
        refused(&with("RANK", "8"), "RANK: expected less than WORLD_SIZE = 8, found 8");
        refused(&with("WORLD_SIZE", "4294967296"), "WORLD_SIZE: expected at most 65536");
        refused(&with("WORLD_SIZE", "0"), "RANK: expected less than WORLD_SIZE = 0, found 3");
        refused(&with("LOCAL_RANK", "9"), "LOCAL_RANK: expected less than WORLD_SIZE = 8, found 9");
        refused(&with("RANK", "-1"), "RANK: expected a number, found \"-1\"");
        refused(&with("WORLD_SIZE", "eight"), "WORLD_SIZE: expected a number");
        refused(&with("MASTER_PORT", "70000"), "MASTER_PORT: expected a number, found \"70000\"");
        refused(&with("MASTER_PORT", "0"), "MASTER_PORT: expected a port above 0");
        refused(&with("CANDLE_QUANT_PORT", "0"), "CANDLE_QUANT_PORT: expected a port above 0");
        let elastic =
            [&with("MASTER_PORT", "65535")[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        refused(&elastic, "MASTER_PORT: expected less than 65535");
        let forgotten =
            [&MPI[..], &MASTER, &[("RANK", "0"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", "0")]].concat();
        refused(&forgotten, "OMPI_COMM_WORLD_RANK: expected 0, as other variables say, found 5");
    }
}
