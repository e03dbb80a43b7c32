//! Removes secrets from texts.

/// Written in place of a secret.
const REMOVED: &str = "(removed)";

/// Shortest contents of a secret file that are looked for: shorter ones are words.
const SHORTEST: usize = 8;

/// Prefix of the tokens of the API.
const TOKEN: &str = "pft-";

/// Parts of the names of settings whose values are secret.
const NAMES: [&str; 6] = [
    "password",
    "passwd",
    "secret",
    "api_key",
    "access_key",
    "credential",
];

/// Settings whose values are command lines, which may have secrets in them.
const COMMANDS: [&str; 4] = [
    "key-command",
    "key_command",
    "old-key-command",
    "old_key_command",
];

pub(super) struct Cleaner {
    secrets: Vec<String>,
    /// Number of secrets that were removed.
    pub(super) removed: usize,
}

impl Cleaner {
    /// Removes these texts, line by line and word by word, and whatever looks like a secret.
    pub(super) fn new(texts: Vec<String>) -> Self {
        let mut secrets: Vec<String> = texts
            .iter()
            .flat_map(|text| text.split(|letter: char| letter.is_whitespace() || letter == ':'))
            .filter(|word| word.len() >= SHORTEST)
            .map(str::to_owned)
            .collect();
        // The longer first: one may be a part of another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        Self {
            secrets,
            removed: 0,
        }
    }

    /// Returns the text without secrets. `settings` says whether it may have settings: in JSON, words such as password
    /// are those of messages, and what follows them has to stay for the text to be JSON.
    pub(super) fn clean(&mut self, text: &str, settings: bool) -> String {
        let mut text = text.to_owned();
        for secret in &self.secrets {
            let found = text.matches(secret.as_str()).count();
            if found > 0 {
                self.removed += found;
                text = text.replace(secret.as_str(), REMOVED);
            }
        }
        let mut clean = String::with_capacity(text.len());
        let mut in_key = false;
        for line in text.split_inclusive('\n') {
            if line.contains("-----BEGIN") && line.contains("PRIVATE KEY") {
                in_key = true;
                self.removed += 1;
                clean.push_str(REMOVED);
                clean.push('\n');
            }
            if !in_key {
                clean.push_str(&self.line(line, settings));
            }
            if line.contains("-----END") {
                in_key = false;
            }
        }
        clean
    }

    fn line(&mut self, line: &str, settings: bool) -> String {
        let line = self.after(line, TOKEN, true);
        let line = self.after(&line, "Bearer ", false);
        let line = self.user_of_url(&line);
        match settings {
            true => self.setting(&line),
            false => line,
        }
    }

    /// Removes the word that follows a prefix, `with` the prefix.
    fn after(&mut self, line: &str, prefix: &str, with: bool) -> String {
        let mut clean = String::new();
        let mut rest = line;
        while let Some(at) = rest.find(prefix) {
            let (before, found) = rest.split_at(at);
            let (kept, word) = found.split_at(prefix.len());
            let end = word
                .find(|letter: char| !letter.is_ascii_alphanumeric() && !"-._~+/=".contains(letter))
                .unwrap_or(word.len());
            clean.push_str(before);
            if end == 0 {
                clean.push_str(kept);
            } else {
                clean.push_str(if with { "" } else { kept });
                clean.push_str(REMOVED);
                self.removed += 1;
            }
            rest = &word[end..];
        }
        clean.push_str(rest);
        clean
    }

    /// Removes `user:password@` of URLs.
    fn user_of_url(&mut self, line: &str) -> String {
        let mut clean = String::new();
        let mut rest = line;
        while let Some(at) = rest.find("://") {
            let (before, authority) = rest.split_at(at + 3);
            clean.push_str(before);
            let end = authority
                .find(|letter: char| letter.is_whitespace() || "/\"'".contains(letter))
                .unwrap_or(authority.len());
            match authority[..end].rfind('@') {
                Some(user) => {
                    clean.push_str(REMOVED);
                    self.removed += 1;
                    rest = &authority[user..];
                }
                None => rest = authority,
            }
        }
        clean.push_str(rest);
        clean
    }

    /// Removes the value of a setting whose name says that it is secret: `name = value`, `name: value`, `--name value`.
    fn setting(&mut self, line: &str) -> String {
        let lower = line.to_ascii_lowercase();
        let all = NAMES.iter().chain(&COMMANDS);
        let Some(at) = all.filter_map(|name| lower.find(name)).min() else {
            return line.to_owned();
        };
        let Some(divider) = line[at..].find(['=', ':', ' ']) else {
            return line.to_owned();
        };
        let tail = &line[at + divider..];
        let skipped = tail.find(|letter: char| !" =:\"'".contains(letter));
        let (before, value) = line.split_at(at + divider + skipped.unwrap_or(tail.len()));
        if value.trim().is_empty() {
            return line.to_owned();
        }
        self.removed += 1;
        let end = if line.ends_with('\n') { "\n" } else { "" };
        format!("{before}{REMOVED}{end}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_every_kind_are_removed_and_the_rest_stays() {
        let mut cleaner = Cleaner::new(vec!["root:planted-etcd-pass\n".to_owned()]);
        let key = "-----BEGIN PRIVATE KEY-----\nplanted-pem\n-----END PRIVATE KEY-----\n";
        let text = format!(
            "level = 3\nAuthorization: Bearer planted-bearer\ntoken pft-planted0 in a log\n\
             url http://user:planted-url@h:1/x and http://h:2/y\npassword = \"planted-toml\"\n\
             --key-command planted-command get\nsaid planted-etcd-pass twice planted-etcd-pass\n{key}end\n"
        );
        let clean = cleaner.clean(&text, true);
        assert!(!clean.contains("planted"), "{clean}");
        for kept in [
            "level = 3\n",
            " in a log",
            "@h:1/x and http://h:2/y",
            "end\n",
            "password =",
        ] {
            assert!(clean.contains(kept), "{kept}: {clean}");
        }
        assert_eq!(cleaner.removed, 8, "{clean}");
        let json = "{\"advice\": \"replace the secret if need be\"}\n";
        assert_eq!(cleaner.clean(json, false), json);
    }

    #[test]
    fn any_text_is_cleaned_without_a_panic() {
        let mut cleaner = Cleaner::new(Vec::new());
        for text in [
            "",
            "pft-",
            "Bearer ",
            "://",
            "://@",
            "password",
            "password=",
            "ä://ö@ü",
            "key_command",
        ] {
            assert!(cleaner.clean(text, true).len() >= text.len(), "{text}");
        }
    }
}
