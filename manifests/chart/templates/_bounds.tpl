{{- /* What a pod may request, from the values that also configure the plugin, as JSON: for each sub-plugin whose
annotations the plugin reads, {"place": of allow, "": if no value sets it, "grants": [{"place", "scope": for messages,
"condition": in CEL, "keys": {KEY: its items}}]}. */ -}}
{{- define "detour.bounds" -}}
{{- $chains := list (ternary (list (dict "type" "uid-exclude") (dict "type" "dns-exclude")) (.Values.config.chain | default list) (kindIs "invalid" .Values.config.chain)) -}}
{{- range .Values.attachments -}}
{{- $chains = append $chains (.chain | default list) -}}
{{- end -}}
{{- $all := dict -}}
{{- range $type := list "uid-exclude" "dns-exclude" "container-exclude" "destination-exclude" -}}
{{- $blocks := list -}}
{{- range $chain := $chains -}}
{{- range $chain -}}
{{- if eq .type $type -}}
{{- $blocks = append $blocks . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $allow := $.Values.config.allow -}}
{{- $place := ternary "" "config.allow" (kindIs "invalid" $allow) -}}
{{- $own := "" -}}
{{- $pinned := false -}}
{{- $reads := false -}}
{{- range $index, $block := first $chains -}}
{{- if eq $block.type $type -}}
{{- $pinned = or $pinned (and (kindIs "bool" $block.pod_overrides) (not $block.pod_overrides)) -}}
{{- if not (kindIs "invalid" $block.allow) -}}
{{- if $own -}}
{{- fail (printf "config.chain[%d].allow: %s is already set for %s; remove one of them" $index $own $type) -}}
{{- end -}}
{{- $allow = $block.allow -}}
{{- $own = printf "config.chain[%d].allow" $index -}}
{{- $place = $own -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $blocks -}}
{{- $reads = or $reads (not (kindIs "bool" .pod_overrides)) .pod_overrides -}}
{{- end -}}
{{- if and $reads (not $pinned) -}}
{{- $grants := list -}}
{{- $isList := kindIs "slice" $allow -}}
{{- range $index, $grant := ternary $allow (list $allow) $isList -}}
{{- if $place -}}
{{- $grants = append $grants (include "detour.grant" (list $grant (ternary (printf "%s[%d]" $place $index) $place $isList)) | fromJson) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $all $type (dict "place" $place "grants" $grants) -}}
{{- end -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{- /* One grant (first item of the list) at its place (second item), as JSON. A grant without keys permits everything. */ -}}
{{- define "detour.grant" -}}
{{- $grant := index . 0 | default dict -}}
{{- $kinds := list "uids" "gids" "containers" "ports" "ip_ranges" "resolvers" -}}
{{- $keys := dict -}}
{{- range $key := concat $kinds (list "kinds") -}}
{{- if and (hasKey $grant $key) (not (kindIs "invalid" (get $grant $key))) -}}
{{- $_ := set $keys $key (include "detour.items" (get $grant $key) | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- range $key := ternary $kinds list (empty (pick $keys "uids" "gids" "containers" "ports" "ip_ranges" "resolvers")) -}}
{{- $_ := set $keys $key (list "*") -}}
{{- end -}}
{{- $conditions := list -}}
{{- $scope := list -}}
{{- if not (kindIs "invalid" $grant.namespaces) -}}
{{- $names := include "detour.items" $grant.namespaces | fromJsonArray -}}
{{- $conditions = append $conditions (printf "variables.ownNamespace.metadata.name in %s" (toJson $names)) -}}
{{- $scope = append $scope (printf "namespaces %s" (join ", " $names | default "none")) -}}
{{- end -}}
{{- if not (kindIs "invalid" $grant.namespace_selector) -}}
{{- $conditions = append $conditions (include "detour.cel.selects" $grant.namespace_selector) -}}
{{- $scope = append $scope "namespaces with certain labels" -}}
{{- end -}}
{{- dict "place" (index . 1) "keys" $keys "condition" (join " || " $conditions) "scope" (join " or " $scope) | toJson -}}
{{- end -}}

{{- /* A list of the configuration, as a JSON array of strings: an array, a comma-separated string or a number. */ -}}
{{- define "detour.items" -}}
{{- $items := list -}}
{{- range ternary . (list .) (kindIs "slice" .) -}}
{{- range splitList "," (ternary (printf "%d" (int64 .)) (toString .) (or (kindIs "float64" .) (kindIs "int64" .) (kindIs "int" .))) -}}
{{- with trim . -}}
{{- $items = append $items (regexReplaceAll "^container:\\s*" . "container:") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $items | toJson -}}
{{- end -}}
