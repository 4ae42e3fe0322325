//! Faults of a call: each of its system calls, what the kernel refuses, its saved state, its network namespace, its
//! executables, and concurrent calls. A call that fails or is killed leaves the rules of before or of after it, and the
//! next call completes the work. `hack/faults.sh` runs these tests with the release binary.

mod call;
mod cycles;
mod executables;
mod kernel_refusals;
mod netns;
mod parallel;
mod ruleset;
mod state;
mod subject;
mod system_calls;
