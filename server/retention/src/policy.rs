//! Policies: what each namespace keeps, and how much it may have.

use std::collections::BTreeMap;
use std::time::Duration;

use permafrost_protocol::control::RetentionRule;
use permafrost_protocol::manifest::check_job_name;
use serde::{Deserialize, Serialize};

use crate::{JobGlob, PolicyError};

/// Most rules in all namespaces together.
pub const MAX_RULES: usize = 4096;

/// Version of the document.
const VERSION: u64 = 1;

/// Longest age that a rule can name, seconds: 100 years.
const MAX_AGE_S: u64 = 100 * 365 * 86_400;

/// Fate of a dump for which a quota has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OverQuota {
    /// The dump is refused.
    #[default]
    Refuse,
    /// The oldest generations are removed until there is room.
    RemoveOldest,
}

impl OverQuota {
    /// Returns the word of the command line.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::RemoveOldest => "remove-oldest",
        }
    }
}

/// Settings of a rule. A setting that is absent, or false, is not set by this rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Keep all generations.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub keep_all: bool,
    /// Keep this many of a job's newest generations, those that can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_last: Option<u64>,
    /// Keep generations that are younger, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_within_s: Option<u64>,
    /// Most bytes: of the namespace, or of each job that the pattern matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// Most checkpoints: of the namespace, or of each job that the pattern matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_checkpoints: Option<u64>,
    /// Fate of a dump beyond those limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_quota: Option<OverQuota>,
}

impl Settings {
    /// Checks the values.
    ///
    /// # Errors
    /// A value makes no sense, or nothing is set.
    pub fn check(&self) -> Result<(), PolicyError> {
        let at_least_one = [
            ("--keep-last", self.keep_last),
            ("--keep-within", self.keep_within_s),
            ("--max-bytes", self.max_bytes),
            ("--max-checkpoints", self.max_checkpoints),
        ];
        let wrong = |setting, value: u64| PolicyError::Value {
            setting,
            value: value.to_string(),
        };
        if let Some((setting, _)) = at_least_one.iter().find(|(_, value)| *value == Some(0)) {
            return Err(wrong(setting, 0));
        }
        if let Some(age_s) = self.keep_within_s.filter(|&age_s| age_s > MAX_AGE_S) {
            return Err(wrong("--keep-within", age_s));
        }
        if self.keep_all && (self.keep_last.is_some() || self.keep_within_s.is_some()) {
            return Err(PolicyError::KeepAllAndSome);
        }
        if !self.says_what_to_keep() && self.max_bytes.is_none() && self.max_checkpoints.is_none() {
            return Err(PolicyError::Empty);
        }
        Ok(())
    }

    /// Returns true if the rule says what to keep. Otherwise that is said by the namespace's rule.
    #[must_use]
    pub fn says_what_to_keep(&self) -> bool {
        self.keep_all || self.keep_last.is_some() || self.keep_within_s.is_some()
    }

    /// Returns the age up to which generations are kept.
    #[must_use]
    pub fn keep_within(&self) -> Option<Duration> {
        self.keep_within_s.map(Duration::from_secs)
    }
}

/// Rules of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NamespacePolicy {
    /// Rule of the namespace: what each of its jobs keeps, and how much all of them may have together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<Settings>,
    /// Rules of jobs, by pattern: what a job keeps in place of what the namespace says, and how much each job may have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub jobs: BTreeMap<String, Settings>,
}

/// The rule that applies to a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobPolicy {
    /// Settings that say what to keep; those of the namespace, or of the job.
    pub keep: Settings,
    /// Limits of the job itself.
    pub limits: Settings,
    /// Fate of a dump beyond the limits of the job.
    pub over_quota: OverQuota,
}

impl NamespacePolicy {
    /// Returns the rule of a job, named in full. Of several patterns that match, the one with most literal characters
    /// counts, then the first by the alphabet.
    #[must_use]
    pub fn of_job(&self, job: &str) -> JobPolicy {
        let name = job.split_once('/').map_or(job, |(_, name)| name);
        let matching = self.jobs.iter().filter_map(|(pattern, settings)| {
            let glob = JobGlob::new(pattern)
                .ok()
                .filter(|glob| glob.matches(name))?;
            Some((glob.literal_chars(), settings))
        });
        // The last of several maxima would win: the order is turned round.
        let matching: Vec<_> = matching.collect();
        let own = matching.iter().rev().max_by_key(|(literal, _)| *literal);
        let own = own.map(|(_, settings)| (*settings).clone());
        let whole = self.namespace.clone().unwrap_or_default();
        let over_quota = own.as_ref().and_then(|own| own.over_quota);
        let keep = match &own {
            Some(own) if own.says_what_to_keep() => own.clone(),
            _ => whole.clone(),
        };
        JobPolicy {
            keep,
            limits: own.unwrap_or_default(),
            over_quota: over_quota.or(whole.over_quota).unwrap_or_default(),
        }
    }

    /// Returns true if a rule limits bytes or checkpoints.
    #[must_use]
    pub fn has_limits(&self) -> bool {
        let all = self.namespace.iter().chain(self.jobs.values());
        all.clone()
            .any(|rule| rule.max_bytes.is_some() || rule.max_checkpoints.is_some())
    }

    fn len(&self) -> usize {
        self.jobs.len() + usize::from(self.namespace.is_some())
    }
}

/// The policies of all namespaces: one document, in a file or in the registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policies(BTreeMap<String, NamespacePolicy>);

/// The document as it is stored. A field that is not known is no rule to be left out: such a document is refused.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    v: u64,
    namespaces: BTreeMap<String, NamespacePolicy>,
}

impl Policies {
    /// Returns the policy of a namespace, if there is one.
    #[must_use]
    pub fn of(&self, namespace: &str) -> Option<&NamespacePolicy> {
        self.0.get(namespace)
    }

    /// Returns the namespaces that have a policy, sorted.
    pub fn namespaces(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns true if there is no rule.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Puts a rule in the place of the one with the same namespace and pattern. An empty pattern stands for the
    /// namespace.
    ///
    /// # Errors
    /// The rule is not valid, or there are too many.
    pub fn set(
        &mut self,
        namespace: &str,
        jobs: &str,
        settings: Settings,
    ) -> Result<(), PolicyError> {
        check_namespace(namespace)?;
        settings.check()?;
        let rules: usize = self.0.values().map(NamespacePolicy::len).sum();
        if rules >= MAX_RULES && self.find(namespace, jobs).is_none() {
            return Err(PolicyError::TooMany { limit: MAX_RULES });
        }
        if jobs.is_empty() {
            self.0.entry(namespace.to_owned()).or_default().namespace = Some(settings);
        } else {
            let glob = JobGlob::new(jobs)?;
            let of = self.0.entry(namespace.to_owned()).or_default();
            of.jobs.insert(glob.to_string(), settings);
        }
        Ok(())
    }

    /// Removes a rule.
    ///
    /// # Errors
    /// There is no such rule.
    pub fn remove(&mut self, namespace: &str, jobs: &str) -> Result<(), PolicyError> {
        let removed = self.0.get_mut(namespace).and_then(|policy| match jobs {
            "" => policy.namespace.take(),
            jobs => policy.jobs.remove(jobs),
        });
        if removed.is_none() {
            let short = |text: &str| text.chars().take(64).collect::<String>();
            return Err(PolicyError::Missing {
                scope: scope(&short(namespace), &short(jobs)),
            });
        }
        self.0.retain(|_, policy| policy.len() > 0);
        Ok(())
    }

    fn find(&self, namespace: &str, jobs: &str) -> Option<&Settings> {
        let policy = self.0.get(namespace)?;
        match jobs {
            "" => policy.namespace.as_ref(),
            jobs => policy.jobs.get(jobs),
        }
    }

    /// Returns the rules as the protocol has them: by namespace, the namespace's own rule first.
    pub fn rules(&self) -> impl Iterator<Item = RetentionRule> + '_ {
        self.0.iter().flat_map(|(namespace, policy)| {
            let whole = policy.namespace.iter().map(|settings| ("", settings));
            let jobs = policy.jobs.iter();
            let jobs = jobs.map(|(pattern, settings)| (pattern.as_str(), settings));
            whole.chain(jobs).map(|(jobs, settings)| RetentionRule {
                namespace: namespace.clone(),
                jobs: jobs.to_owned(),
                keep_all: settings.keep_all,
                keep_last: settings.keep_last,
                keep_within_s: settings.keep_within_s,
                max_bytes: settings.max_bytes,
                max_checkpoints: settings.max_checkpoints,
                over_quota: settings
                    .over_quota
                    .map_or_else(String::new, |word| word.word().to_owned()),
            })
        })
    }

    /// Encodes the document.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let document = Document {
            v: VERSION,
            namespaces: self.0.clone(),
        };
        // Maps and structs of strings and numbers always serialize.
        serde_json::to_vec(&document).unwrap_or_default()
    }

    /// Decodes and checks a document.
    ///
    /// # Errors
    /// It is damaged, of a newer version, or has a rule that is not valid.
    pub fn decode(bytes: &[u8]) -> Result<Self, PolicyError> {
        // The version is read first: a newer document may have another shape.
        #[derive(Deserialize)]
        struct Version {
            v: u64,
        }
        let damaged = |source| PolicyError::Damaged { source };
        let Version { v } = serde_json::from_slice(bytes).map_err(damaged)?;
        if v != VERSION {
            return Err(PolicyError::Version {
                found: v,
                known: VERSION,
            });
        }
        let document: Document = serde_json::from_slice(bytes).map_err(damaged)?;
        let mut checked = Self::default();
        for (namespace, policy) in document.namespaces {
            if let Some(settings) = policy.namespace {
                checked.set(&namespace, "", settings)?;
            }
            for (jobs, settings) in policy.jobs {
                // An empty one would be the namespace's.
                JobGlob::new(&jobs)?;
                checked.set(&namespace, &jobs, settings)?;
            }
        }
        Ok(checked)
    }
}

/// Returns the settings of a rule of the protocol, checked.
impl TryFrom<&RetentionRule> for Settings {
    type Error = PolicyError;

    fn try_from(rule: &RetentionRule) -> Result<Self, PolicyError> {
        let over_quota = match rule.over_quota.as_str() {
            "" => None,
            "refuse" => Some(OverQuota::Refuse),
            "remove-oldest" => Some(OverQuota::RemoveOldest),
            other => {
                return Err(PolicyError::Value {
                    setting: "--over-quota",
                    value: format!("{:?}", other.chars().take(64).collect::<String>()),
                });
            }
        };
        let settings = Self {
            keep_all: rule.keep_all,
            keep_last: rule.keep_last,
            keep_within_s: rule.keep_within_s,
            max_bytes: rule.max_bytes,
            max_checkpoints: rule.max_checkpoints,
            over_quota,
        };
        settings.check()?;
        Ok(settings)
    }
}

fn scope(namespace: &str, jobs: &str) -> String {
    match jobs {
        "" => format!("namespace {namespace}"),
        jobs => format!("jobs {jobs} of namespace {namespace}"),
    }
}

/// Checks a namespace: a job name without a slash.
fn check_namespace(namespace: &str) -> Result<(), PolicyError> {
    if namespace.contains('/') || check_job_name(namespace).is_err() {
        return Err(PolicyError::Namespace {
            namespace: namespace.chars().take(64).collect(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(keep_last: u64) -> Settings {
        Settings {
            keep_last: Some(keep_last),
            ..Settings::default()
        }
    }

    #[test]
    fn the_most_specific_pattern_counts_and_the_rest_comes_from_the_namespace() {
        let mut policies = Policies::default();
        let whole = Settings {
            max_bytes: Some(100),
            over_quota: Some(OverQuota::RemoveOldest),
            ..last(1)
        };
        policies.set("a", "", whole.clone()).unwrap();
        policies.set("a", "*", last(2)).unwrap();
        policies.set("a", "train-*", last(3)).unwrap();
        policies.set("a", "*-train", last(9)).unwrap();
        let limited = Settings {
            max_checkpoints: Some(5),
            ..Settings::default()
        };
        policies.set("a", "train-7", limited).unwrap();
        let policy = policies.of("a").unwrap();
        assert_eq!(policy.of_job("a/x").keep.keep_last, Some(2));
        assert_eq!(policy.of_job("a/train-8").keep.keep_last, Some(3));
        // Equally specific: the first.
        assert_eq!(policy.of_job("a/train-train").keep.keep_last, Some(9));
        let seven = policy.of_job("a/train-7");
        assert_eq!(seven.keep, whole);
        assert_eq!(seven.limits.max_checkpoints, Some(5));
        assert_eq!(seven.limits.max_bytes, None, "the namespace's is no job's");
        assert_eq!(seven.over_quota, OverQuota::RemoveOldest);
        assert_eq!(policies.of("b"), None);
    }

    #[test]
    fn a_document_comes_back() {
        let mut policies = Policies::default();
        policies.set("a", "", last(1)).unwrap();
        policies.set("b", "x*", last(2)).unwrap();
        assert_eq!(Policies::decode(&policies.encode()).unwrap(), policies);
        assert_eq!(policies.rules().count(), 2);
        policies.remove("a", "").unwrap();
        assert!(matches!(
            policies.remove("a", ""),
            Err(PolicyError::Missing { .. })
        ));
        policies.remove("b", "x*").unwrap();
        assert!(policies.is_empty());
    }

    #[test]
    fn a_document_that_is_damaged_or_newer_is_refused() {
        for text in [
            "",
            "{",
            "[]",
            r#"{"v":1}"#,
            r#"{"v":1,"namespaces":{},"more":1}"#,
            r#"{"v":1,"namespaces":{"a":{"namespace":{"keep_last":1,"keep_best":2}}}}"#,
            r#"{"v":1,"namespaces":{"a":{"namespace":{"keep_last":-1}}}}"#,
            r#"{"v":1,"namespaces":{"a":{"namespace":{"keep_last":1e30}}}}"#,
        ] {
            let refused = Policies::decode(text.as_bytes()).unwrap_err();
            assert!(matches!(refused, PolicyError::Damaged { .. }), "{text}");
        }
        for text in [
            r#"{"v":1,"namespaces":{"a/b":{"namespace":{"keep_last":1}}}}"#,
            r#"{"v":1,"namespaces":{"a":{"namespace":{}}}}"#,
            r#"{"v":1,"namespaces":{"a":{"namespace":{"keep_last":0}}}}"#,
            r#"{"v":1,"namespaces":{"a":{"jobs":{"":{"keep_last":1}}}}}"#,
            r#"{"v":1,"namespaces":{"a":{"jobs":{"b c":{"keep_last":1}}}}}"#,
        ] {
            assert!(Policies::decode(text.as_bytes()).is_err(), "{text}");
        }
        let newer = Policies::decode(br#"{"v":2,"rules":[]}"#).unwrap_err();
        assert!(matches!(newer, PolicyError::Version { found: 2, .. }));
    }

    #[test]
    fn values_without_sense_are_refused() {
        let wrong = [
            last(0),
            Settings::default(),
            Settings {
                keep_within_s: Some(u64::MAX),
                ..Settings::default()
            },
            Settings {
                max_checkpoints: Some(0),
                ..Settings::default()
            },
            Settings {
                max_bytes: Some(0),
                ..last(1)
            },
            Settings {
                keep_all: true,
                ..last(1)
            },
            Settings {
                over_quota: Some(OverQuota::Refuse),
                ..Settings::default()
            },
        ];
        for settings in wrong {
            assert!(Policies::default().set("a", "", settings.clone()).is_err());
        }
        for namespace in ["", "a/b", "..", ".a", "a b", "*"] {
            assert!(Policies::default().set(namespace, "", last(1)).is_err());
        }
    }

    #[test]
    fn the_number_of_rules_is_limited() {
        let mut policies = Policies::default();
        for number in 0..MAX_RULES {
            policies.set("a", &format!("j{number}"), last(1)).unwrap();
        }
        let refused = policies.set("a", "one-more", last(1)).unwrap_err();
        assert!(matches!(refused, PolicyError::TooMany { .. }));
        policies.set("a", "j7", last(2)).unwrap();
    }
}
