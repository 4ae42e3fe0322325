//! The configuration of a NetworkAttachmentDefinition.

use super::configuration::RunnableConfiguration;
use super::files;
use crate::cluster::Definition;
use crate::cni::{Code, Error, at_most};
use crate::pod::well_known::RESOURCE_NAME;
use std::path::Path;

/// Limit of plugins in a definition: each is a process.
const MAX_PLUGINS: usize = 100;

/// Returns the configuration of a definition: its own, or if it has none the one with its name in `conf_dir`. A
/// configuration without a name gets the definition's.
///
/// # Errors
/// [`Code::InvalidConfig`] with the definition, the key and the expected value: the configuration is missing or invalid,
/// or it requests a device from a device plugin.
pub fn configuration(
    definition: &Definition,
    conf_dir: &Path,
    warnings: &mut Vec<String>,
) -> Result<RunnableConfiguration, Error> {
    let place = format!("NetworkAttachmentDefinition {}", definition.object);
    if let Some(resource) = definition.resource_name().filter(|resource| !resource.is_empty()) {
        let msg = format!(
            "{place}: annotation {RESOURCE_NAME:?} requests a device of {resource:?}: device plugins are not supported; \
             remove the annotation, or use Multus for this pod's networks"
        );
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if definition.config.len() > Definition::MAX_CONFIG {
        let msg = format!("{place}: spec.config: expected at most {} bytes, got more", Definition::MAX_CONFIG);
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if definition.config.trim().is_empty() {
        files::named(conf_dir, &definition.object.name, warnings).map_err(|error| Error {
            msg: format!("{place}: spec.config is empty, searched confDir: {}", error.msg),
            ..error
        })
    } else {
        let place = format!("{place}: spec.config");
        let configuration = RunnableConfiguration::parse(&place, &definition.config, Some(&definition.object.name))?;
        at_most(MAX_PLUGINS, "plugins", &place, configuration.plugins.len())?;
        Ok(configuration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ObjectRef;

    fn definition(config: &str) -> Definition {
        let object = ObjectRef { namespace: "shop".into(), name: "a.b".into() };
        Definition { object, config: config.into(), ..Definition::default() }
    }

    fn read(definition: &Definition) -> Result<RunnableConfiguration, Error> {
        configuration(definition, Path::new("/absent"), &mut Vec::new())
    }

    #[test]
    fn a_configuration_without_a_name_gets_the_definitions() {
        let read = read(&definition("{\"type\":\"bridge\"}")).expect("accepted");
        assert_eq!((&*read.name, &*read.text), ("a.b", "{\"name\":\"a.b\",\"type\":\"bridge\"}"));
    }

    #[test]
    fn errors_contain_the_definition_and_the_key() {
        for (config, wanted) in [
            ("{", "NetworkAttachmentDefinition shop/a.b: spec.config: invalid JSON: EOF"),
            ("{\"type\":\"/bin/sh\"}", "NetworkAttachmentDefinition shop/a.b: spec.config.type: "),
            ("", "NetworkAttachmentDefinition shop/a.b: spec.config is empty, searched confDir: /absent can't be read"),
            (" \n", "NetworkAttachmentDefinition shop/a.b: spec.config is empty, searched confDir: /absent"),
        ] {
            let error = read(&definition(config)).expect_err(config);
            assert!(error.code == Code::InvalidConfig && error.msg.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn a_configuration_that_is_too_large_is_rejected() {
        let padded =
            |length: usize| format!("{{\"type\":\"bridge\"{}}}", " ".repeat(length - "{\"type\":\"bridge\"}".len()));
        assert!(read(&definition(&padded(Definition::MAX_CONFIG))).is_ok());
        let error = read(&definition(&padded(Definition::MAX_CONFIG + 1))).expect_err("refused");
        let wanted = "NetworkAttachmentDefinition shop/a.b: spec.config: expected at most 262144 bytes, got more";
        assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
    }

    #[test]
    fn a_definition_with_too_many_plugins_is_rejected() {
        let list = |plugins: usize| format!("{{\"plugins\":[{}]}}", vec!["{\"type\":\"a\"}"; plugins].join(","));
        assert_eq!(read(&definition(&list(MAX_PLUGINS))).expect("accepted").plugins.len(), MAX_PLUGINS);
        let error = read(&definition(&list(MAX_PLUGINS + 1))).expect_err("too many");
        let place = "NetworkAttachmentDefinition shop/a.b: spec.config";
        assert_eq!(error.msg, format!("{place}: expected at most 100 plugins, got 101"));
    }

    #[test]
    fn devices_are_rejected() {
        let mut sriov = definition("{\"type\":\"sriov\"}");
        sriov.annotations.insert(RESOURCE_NAME.into(), "intel.com/sriov".into());
        let error = read(&sriov).expect_err("a device");
        assert!(
            error.code == Code::InvalidConfig && error.msg.contains("\"intel.com/sriov\": device plugins"),
            "{error}"
        );
        sriov.annotations.insert(RESOURCE_NAME.into(), String::new());
        assert!(read(&sriov).is_ok());
    }
}
