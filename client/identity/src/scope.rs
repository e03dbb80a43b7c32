//! Scopes: the groups of requests that a caller of the HTTP API may make.

use std::fmt;
use std::str::FromStr;

use super::Role;

/// A kind of request that a caller may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Scope {
    /// Requests for nodes, jobs, costs and decisions, none of which changes anything.
    Read = 1,
    /// Requests to reserve and give up places in the queues.
    Reserve = 2,
    /// Requests to set the starting estimates.
    Operate = 4,
}

impl Scope {
    /// All of the scopes.
    pub const ALL: [Self; 3] = [Self::Read, Self::Reserve, Self::Operate];

    /// Returns the scope's name, as written in the file of tokens.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Reserve => "reserve",
            Self::Operate => "operate",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A word that is not the name of a scope.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is no scope: read, reserve or operate")]
pub struct NoScope {
    /// Word that names no scope.
    pub word: String,
}

impl FromStr for Scope {
    type Err = NoScope;

    fn from_str(word: &str) -> Result<Self, NoScope> {
        let named = Self::ALL.into_iter().find(|scope| scope.name() == word);
        named.ok_or_else(|| NoScope {
            word: word.to_owned(),
        })
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns the set of all scopes.
    #[must_use]
    pub fn all() -> Self {
        Scope::ALL.into_iter().collect()
    }

    /// Returns true if `scope` is in the set.
    #[must_use]
    pub const fn contains(self, scope: Scope) -> bool {
        self.0 & scope as u8 != 0
    }

    /// Returns the scopes that a certificate's role grants. An operator dumps nothing, so it may not reserve; a
    /// node acts for others, but does not operate the cluster.
    #[must_use]
    pub fn of_role(role: Role) -> Self {
        match role {
            Role::Node | Role::Agent => [Scope::Read, Scope::Reserve].into_iter().collect(),
            Role::Reader => [Scope::Read].into_iter().collect(),
            Role::Operator => [Scope::Read, Scope::Operate].into_iter().collect(),
        }
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        Self(scopes.into_iter().fold(0, |set, scope| set | scope as u8))
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for scope in Scope::ALL.into_iter().filter(|scope| self.contains(*scope)) {
            write!(formatter, "{between}{scope}")?;
            between = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_allow_what_the_table_says() {
        let table = [
            (Role::Node, "read,reserve"),
            (Role::Agent, "read,reserve"),
            (Role::Reader, "read"),
            (Role::Operator, "read,operate"),
        ];
        assert_eq!(table.len(), Role::ALL.len());
        for (role, scopes) in table {
            assert_eq!(Scopes::of_role(role).to_string(), scopes, "{role}");
        }
        assert_eq!(Scopes::all().to_string(), "read,reserve,operate");
        assert!(
            Scope::ALL
                .iter()
                .all(|scope| !Scopes::NONE.contains(*scope))
        );
    }

    #[test]
    fn a_scope_has_one_name() {
        for scope in Scope::ALL {
            assert_eq!(scope.name().parse(), Ok(scope));
        }
        for word in ["", "Read", "all", "*", "read,reserve"] {
            assert!(word.parse::<Scope>().is_err(), "{word:?}");
        }
    }
}
