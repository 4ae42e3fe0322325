{{- /* Fails if a value is missing, because it is null, or because "helm upgrade --reuse-values" keeps the previous chart's
values. */ -}}
{{- define "detour.complete" -}}
{{- $objects := list "admissionPolicy" "cni" "config" "containerExclusion" "global" "global.defaultResources" "global.networkPolicy" "grafanaDashboard" "guard" "podMonitor" "primaryPlugin" "prometheusRule" "repair" "resourceQuotas" "taint" -}}
{{- $others := list "image" "cni.credentials" "definitions" "onExit" "repair.enabled" "repair.repairPods" -}}
{{- range $path := concat $objects $others -}}
{{- $value := $.Values -}}
{{- range splitList "." $path -}}
{{- if kindIs "map" $value -}}
{{- $value = ternary (get $value .) nil (hasKey $value .) -}}
{{- end -}}
{{- end -}}
{{- if kindIs "invalid" $value -}}
{{- fail (printf "%s: missing; expected a value; if you use helm upgrade --reuse-values, use --reset-then-reuse-values" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The platform's row in platforms.yaml, as YAML, with the directories of the values. The schema lists its names. */ -}}
{{- define "detour.platform" -}}
{{- include "detour.complete" . -}}
{{- if and (not .Values.global.platform) (.Capabilities.APIVersions.Has "security.openshift.io/v1") -}}
{{- fail "global.platform: no value, but the cluster has OpenShift's API security.openshift.io/v1; expected openshift or microshift, or kubernetes to install neither a SecurityContextConstraints object nor an attachment of Multus" -}}
{{- end -}}
{{- $given := .Values.global.platform | default "kubernetes" -}}
{{- $row := dict -}}
{{- range $name, $facts := .Files.Get "platforms.yaml" | fromYaml -}}
{{- if or (eq $name $given) (has $given $facts.aliases) -}}
{{- $row = merge (dict "name" $name) $facts -}}
{{- end -}}
{{- end -}}
{{- $chained := ternary $row.chained .Values.chained (kindIs "invalid" .Values.chained) -}}
{{- /* Without an entry in the cluster network's list, Multus calls the plugin, or the runtime itself. */ -}}
{{- $provider := ternary "default" "multus" (or $chained (and $row.chained (.Values.primaryPlugin.enabled | default false))) -}}
{{- $onlyMultus := and $row.chained (eq $provider "multus") -}}
{{- $attachmentDir := include "detour.attachmentDir" . -}}
{{- $binDir := .Values.cniBinDir | default $row.cniBinDir -}}
{{- $confDir := .Values.cniConfDir | default (ternary $attachmentDir $row.cniConfDir $onlyMultus) -}}
{{- if eq $binDir $confDir -}}
{{- fail (printf "cniBinDir, cniConfDir: both are %q; expected two directories" $binDir) -}}
{{- end -}}
{{- if and $chained (eq $confDir $attachmentDir) -}}
{{- fail (printf "chained: with true, the plugin is an entry of the cluster network's configuration list, but %q is Multus's directory; set cniConfDir to the cluster network's, or chained to false" $confDir) -}}
{{- end -}}
{{- if and (not $chained) .Values.cniConfFileName .Values.attachments -}}
{{- fail "cniConfFileName: has no effect with attachments, because each attachment has the file NAME.conf; remove one of the two values" -}}
{{- end -}}
{{- dict
  "name" $row.name
  "binDir" $binDir
  "confDir" $confDir
  "netnsDir" (.Values.cniNetnsDir | default $row.netnsDir | default "/run/netns" | replace "/var/run/" "/run/")
  "chained" $chained
  "provider" $provider
  "scc" ($row.scc | default false)
  "seLinuxOptions" (merge (dict) (.Values.seLinuxOptions | default dict) (ternary (dict "type" $row.seLinuxType) dict (hasKey $row "seLinuxType")))
  "resourceQuota" (ternary ($row.resourceQuota | default false) .Values.resourceQuotas.enabled (kindIs "invalid" .Values.resourceQuotas.enabled))
  | toYaml -}}
{{- end -}}

{{- /* The directory on the node for the configuration files of attachments beside an entry in a list. */ -}}
{{- define "detour.attachmentDir" -}}/etc/cni/multus/net.d{{- end -}}

{{- /* The key of the taint of a node on which the plugin is not ready, as in Istio. */ -}}
{{- define "detour.taintKey" -}}cni.istio.io/not-ready{{- end -}}

{{- /* The prefix of all object names; for the release "detour": detour. */ -}}
{{- define "detour.fullname" -}}
{{- include "detour.complete" . -}}
{{- $name := ternary .Release.Name (printf "%s-detour" .Release.Name) (contains "detour" .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Refuses an upgrade that would rename the objects: the old agents would remove the plugin from the nodes while the
new ones install it. */ -}}
{{- define "detour.keepsName" -}}
{{- $fullname := include "detour.fullname" . -}}
{{- if .Release.IsUpgrade -}}
{{- range (lookup "apps/v1" "DaemonSet" .Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $isOwn := eq (dig "metadata" "annotations" "meta.helm.sh/release-name" "" .) $.Release.Name -}}
{{- $name := get $labels "app.kubernetes.io/name" -}}
{{- if and $isOwn (eq (get $labels "app.kubernetes.io/component") "agent") (ne $name $fullname) -}}
{{- fail (printf "release %s: its objects have the prefix %q, expected %q; set fullnameOverride=%s" $.Release.Name $name $fullname $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* These labels never change, because the selector of a DaemonSet is immutable. */ -}}
{{- define "detour.selectorLabels" -}}
app.kubernetes.io/name: {{ include "detour.fullname" . | quote }}
app.kubernetes.io/component: agent
{{- end -}}

{{- /* The labels of the nodes on which agents run. */ -}}
{{- define "detour.nodeSelector" -}}
{{- merge (dict "kubernetes.io/os" "linux") (.Values.nodeSelector | default dict) | toYaml -}}
{{- end -}}

{{- define "detour.podLabels" -}}
{{ include "detour.selectorLabels" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: detour
{{- end -}}

{{- define "detour.labels" -}}
{{ include "detour.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* The image. Fails without a registry, and with all values that name an image of Istio: a values file of istio-cni may
contain them. */ -}}
{{- define "detour.image" -}}
{{- $example := "registry.example/mesh" -}}
{{- $hub := .Values.hub | default .Values.global.hub | default "" -}}
{{- $tag := .Values.tag | default .Values.global.tag | default "" -}}
{{- $complete := contains "/" .Values.image -}}
{{- $istioHub := regexMatch "^(docker\\.io/istio|istio|gcr\\.io/istio-(release|testing)|registry\\.istio\\.io/.*)$" $hub -}}
{{- $wrong := list -}}
{{- if regexMatch "(^|/)(install-cni|istio-cni[^/]*|proxyv2)([:@][^/]*)?$" .Values.image -}}
{{- $wrong = append $wrong (printf "image: %q is Istio's; expected an image of detour, such as %q" .Values.image "detour") -}}
{{- end -}}
{{- if and (not $complete) (not $hub) -}}
{{- $wrong = append $wrong (printf "hub: no image is published; build it with hack/image.sh, push it with \"skopeo copy --all oci:target/image:%s docker://%s/%s:%s\", and set hub to this registry: --set hub=%s" .Chart.AppVersion $example .Values.image .Chart.AppVersion $example) -}}
{{- end -}}
{{- if and (not $complete) $istioHub -}}
{{- $wrong = append $wrong (printf "%s: %q has only Istio's images; expected a registry with images of detour, such as %q" (ternary "hub" "global.hub" (not (empty .Values.hub))) $hub $example) -}}
{{- end -}}
{{- if and (not $complete) (or $istioHub (not $hub)) (regexMatch "^v?[0-9]+\\.[0-9]+([.-]|$)" $tag) -}}
{{- if ne (semver $tag).Major (semver .Chart.AppVersion).Major -}}
{{- $wrong = append $wrong (printf "%s: %q is not a version of detour; expected a tag such as %q, or no value" (ternary "tag" "global.tag" (not (empty .Values.tag))) $tag .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "the values do not name an image of detour:\n- %s" (join "\n- " $wrong)) -}}
{{- end -}}
{{- if $complete }}{{ .Values.image }}{{ else }}{{ $hub }}/{{ .Values.image }}:{{ $tag | default .Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- /* The plugin's configuration, as JSON. Its keys take precedence over the chart's other values. */ -}}
{{- define "detour.config" -}}
{{- $platform := include "detour.platform" . | fromYaml -}}
{{- $config := merge (dict) (deepCopy .Values.config) (ternary (dict "dialect" "nftables") dict (.Values.global.nativeNftables | default false)) -}}
{{- if .Values.guard.enabled -}}
{{- $chain := $config.chain -}}
{{- if kindIs "invalid" $chain -}}
{{- $chain = list (dict "type" "istio-redirect") (dict "type" "uid-exclude") (dict "type" "dns-exclude") -}}
{{- end -}}
{{- $has := false -}}
{{- range $chain }}{{ if eq .type "mesh-guard" }}{{ $has = true }}{{ end }}{{ end -}}
{{- if not $has }}{{ $_ := set $config "chain" (append $chain (dict "type" "mesh-guard")) }}{{ end -}}
{{- end -}}
{{- $kubernetes := $config.kubernetes | default dict -}}
{{- if not (hasKey $config "log_level") -}}
{{- $_ := set $config "log_level" (.Values.logLevel | default "info") -}}
{{- end -}}
{{- if not (hasKey $kubernetes "exclude_namespaces") -}}
{{- $_ := set $kubernetes "exclude_namespaces" (.Values.excludeNamespaces | default list) -}}
{{- end -}}
{{- $fullname := include "detour.fullname" . -}}
{{- if or (ne $fullname "detour") $kubernetes.agent_pod_prefixes -}}
{{- $prefixes := $kubernetes.agent_pod_prefixes | default (list "detour-agent-" "istio-cni-node-") -}}
{{- if kindIs "string" $prefixes -}}
{{- $prefixes = splitList "," (nospace $prefixes) -}}
{{- end -}}
{{- $_ := set $kubernetes "agent_pod_prefixes" (append $prefixes (printf "%s-agent-" $fullname) | uniq) -}}
{{- end -}}
{{- $_ := set $config "kubernetes" $kubernetes -}}
{{- $network := ternary (.Values.primaryPlugin.network | default "") "" (.Values.primaryPlugin.enabled | default false) -}}
{{- if and $network (not $platform.chained) (not (include "detour.attachments" . | fromJson).files) -}}
{{- $_ := set $config "name" $network -}}
{{- end -}}
{{- $config | toJson -}}
{{- end -}}

{{- define "detour.resources" -}}
{{- mustMergeOverwrite (deepCopy .Values.global.defaultResources) (.Values.resources | default dict) | toYaml -}}
{{- end -}}

{{- /* Capabilities of the agent's container: for files that root does not own; for pods' network namespaces; for
users of pods in detour doctor --probe. */ -}}
{{- define "detour.capabilities" -}}
{{- $ofPods := ternary (list "NET_ADMIN" "SYS_ADMIN" "SYS_PTRACE") list (eq (include "detour.entersPods" .) "true") -}}
{{- $ofUsers := ternary (list "SETGID" "SETUID") list .Values.repair.enabled -}}
{{- concat (list "CHOWN" "DAC_OVERRIDE" "FOWNER") (concat $ofPods $ofUsers | sortAlpha) | toYaml -}}
{{- end -}}

{{- /* "true" if the agent enters pods' network namespaces. */ -}}
{{- define "detour.entersPods" -}}
{{- or .Values.repair.enabled (.Values.containerExclusion.enabled | default false) (ne (include "detour.livePolicy" .) "off") -}}
{{- end -}}

{{- /* Whether running pods follow changes: on or off. YAML's unquoted words are booleans. */ -}}
{{- define "detour.livePolicy" -}}
{{- if kindIs "bool" .Values.livePolicy }}{{ ternary "on" "off" .Values.livePolicy }}
{{- else }}{{ .Values.livePolicy | default (ternary "on" "off" .Values.repair.enabled) }}
{{- end -}}
{{- end -}}

{{- /* "true" if the plugin's entry redirects. Without chain, the agent adds the default sub-plugins, which do. */ -}}
{{- define "detour.redirects" -}}
{{- $redirects := kindIs "invalid" .Values.config.chain -}}
{{- range .Values.config.chain -}}
{{- $redirects = or $redirects (eq .type "istio-redirect") -}}
{{- end -}}
{{- $redirects -}}
{{- end -}}

{{- /* The directory of Multus's auxiliary chain, if the agent writes the plugin's file there. */ -}}
{{- define "detour.multusChain" -}}
{{- $directory := .Values.cni.multusChain | default "" -}}
{{- if and $directory (include "detour.platform" . | fromYaml).chained -}}
{{- fail "cni.multusChain: with this value, Multus runs the plugin for every pod, but chained is true, and the plugin would run twice for each pod; set chained to false, or remove the value" -}}
{{- end -}}
{{- if and $directory .Values.primaryPlugin.enabled -}}
{{- fail "cni.multusChain: with this value, Multus runs the plugin, but primaryPlugin.enabled is true; the primary plugin runs Multus's auxiliary chain itself: set config.auxiliaryCNIChainName instead" -}}
{{- end -}}
{{- $directory -}}
{{- end -}}

{{- /* "true" if the agent writes a configuration list of its own instead of editing the cluster network's. A release that only
excludes runs beside another plugin that redirects. */ -}}
{{- define "detour.ownList" -}}
{{- $platform := include "detour.platform" . | fromYaml -}}
{{- $redirects := eq (include "detour.redirects" .) "true" -}}
{{- $istio := .Values.istioOwnedCNIConfig | default false -}}
{{- $given := .Values.cni.ownList -}}
{{- if kindIs "invalid" $given -}}
{{- $given = or $istio (and $platform.chained $redirects (not .Values.primaryPlugin.enabled)) -}}
{{- end -}}
{{- if and $istio (not $given) -}}
{{- fail "cni.ownList: false, but istioOwnedCNIConfig is true; remove one of the two values" -}}
{{- end -}}
{{- if and $given (not $platform.chained) -}}
{{- fail (printf "%s: with true, the agent copies the cluster network's configuration list, but chained is false; set chained to true, or remove the value" (ternary "istioOwnedCNIConfig" "cni.ownList" $istio)) -}}
{{- end -}}
{{- $given -}}
{{- end -}}

{{- /* The mode of repairs. */ -}}
{{- define "detour.repair" -}}
{{- $modes := list -}}
{{- if .Values.repair.repairPods }}{{ $modes = append $modes "repair" }}{{ end -}}
{{- if .Values.repair.deletePods }}{{ $modes = append $modes "delete" }}{{ end -}}
{{- if gt (len $modes) 1 -}}
{{- fail "repair: expected at most one of repairPods and deletePods, got both; to delete pods instead of repairing them in place, set repairPods to false" -}}
{{- end -}}
{{- ternary (first $modes | default "off") "off" .Values.repair.enabled -}}
{{- end -}}
